/* Who calls MPI: the library or program that the return address of a call lies in, looked up once for each address. */

#define _GNU_SOURCE
#include "record.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

enum { SITES = 4096, NAME_BYTES = 48 };

/* Each is an address and, in its lowest byte, the caller: one word, so that it is there whole or not at all. */
static uint64_t sites[SITES];

static pthread_mutex_t naming = PTHREAD_MUTEX_INITIALIZER;
static char names[CALLERS][NAME_BYTES]; /* names[0] is "": not known */
static int callers = 1;

/* Horovod's and mpi4py's libraries by the name of their project, whatever their versions call the file. */
static const char *name_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    const char *file = slash ? slash + 1 : path;
    if (strstr(path, "/horovod/") && strncmp(file, "mpi_lib", 7) == 0) return "horovod";
    if (strstr(path, "/mpi4py/") && strncmp(file, "MPI.", 4) == 0) return "mpi4py";
    return file;
}

static int index_of(const char *name)
{
    int index = 1;
    pthread_mutex_lock(&naming);
    while (index < callers && strncmp(names[index], name, NAME_BYTES - 1) != 0) index++;
    if (index == callers) {
        if (callers < CALLERS) {
            strncpy(names[index], name, NAME_BYTES - 1);
            callers++;
        } else
            index = 0;
    }
    pthread_mutex_unlock(&naming);
    return index;
}

int hvdkit_caller(const void *address)
{
    uint64_t word = (uint64_t)(uintptr_t)address << 8;
    uint64_t first = (word >> 8) * 0x9E3779B97F4A7C15u >> 52;
    int caller = -1;
    for (unsigned probe = 0; probe < SITES; probe++) {
        uint64_t *site = &sites[(first + probe) % SITES];
        uint64_t found = __atomic_load_n(site, __ATOMIC_RELAXED);
        if (found == 0) {
            if (caller < 0) {
                Dl_info info;
                caller = dladdr(address, &info) && info.dli_fname ? index_of(name_of(info.dli_fname)) : 0;
            }
            if (__atomic_compare_exchange_n(site, &found, word | (uint64_t)caller, 0, __ATOMIC_RELAXED,
                                            __ATOMIC_RELAXED))
                return caller;
        }
        if (found >> 8 == word >> 8) return (int)(found & 0xff);
    }
    return 0;
}

const char *hvdkit_caller_name(int caller)
{
    return names[caller];
}
