/* The record of one process: counters that any thread adds to without a lock, and the file that they are written to.

   HVDKIT_MPI_PROFILE          directory of the file mpi_profile.RANK.json; without it nothing is recorded
   HVDKIT_MPI_PROFILE_WAIT     "1": measure in each blocking collective how long this rank waits for the others
   HVDKIT_MPI_PROFILE_EVERY_S  seconds between two writings, so that a job that is killed leaves something; default 60 */

#define _GNU_SOURCE
#include "record.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { BINS = 65, ENTRIES = 512, EVERY_S = 60, PATH_BYTES = 4096 };

/* Calls of 2^(k-1) to 2^k - 1 bytes are in bin k, those of none in bin 0. One cache line. */
typedef struct {
    uint64_t calls, bytes, ns, wait_ns;
    uint64_t least_bytes, least_ns; /* the least value plus 1; 0: none yet */
    uint64_t most_bytes, most_ns;
} Bin;

typedef struct {
    uint64_t key; /* routine, caller, operation, type, processes; 0: free */
    Bin bins[BINS];
} Entry;

static Entry entries[ENTRIES];
static uint64_t lost; /* calls for which no entry was left */
static int recording, measure_wait;
static uint64_t started_ns, paused_at_ns, paused_ns, every_ns, next_write_ns;

static char directory[PATH_BYTES];
static char library[128];
static uint64_t job;
static int rank = -1, size, thread_level;
static pid_t process;
static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;
static int finished;

static const char *const routine_names[] = {
    "",
#define X(name) "MPI_" #name,
    ROUTINES(X)
#undef X
};

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static uint64_t load(const uint64_t *slot)
{
    return __atomic_load_n(slot, __ATOMIC_RELAXED);
}

static void add(uint64_t *slot, uint64_t value)
{
    __atomic_fetch_add(slot, value, __ATOMIC_RELAXED);
}

static void lower(uint64_t *slot, uint64_t value)
{
    uint64_t seen = load(slot), stored = value + 1;
    while ((seen == 0 || stored < seen) &&
           !__atomic_compare_exchange_n(slot, &seen, stored, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

static void raise_to(uint64_t *slot, uint64_t value)
{
    uint64_t seen = load(slot);
    while (value > seen && !__atomic_compare_exchange_n(slot, &seen, value, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

static int bin_of(uint64_t bytes)
{
    return bytes == 0 ? 0 : 64 - __builtin_clzll(bytes);
}

static Entry *entry_of(uint64_t key)
{
    uint64_t first = key * 0x9E3779B97F4A7C15u >> 55;
    for (unsigned probe = 0; probe < ENTRIES; probe++) {
        Entry *entry = &entries[(first + probe) % ENTRIES];
        uint64_t found = load(&entry->key);
        if (found == 0 &&
            __atomic_compare_exchange_n(&entry->key, &found, key, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            return entry;
        if (found == key) return entry;
    }
    return NULL;
}

static void write_string(FILE *file, const char *text)
{
    fputc('"', file);
    for (; *text; text++) {
        unsigned char byte = (unsigned char)*text;
        if (byte == '"' || byte == '\\')
            fprintf(file, "\\%c", byte);
        else if (byte < 0x20 || byte >= 0x7f) /* JSON is UTF-8, and a file name need not be */
            fprintf(file, "\\u%04x", byte);
        else
            fputc(byte, file);
    }
    fputc('"', file);
}

static void write_bin(FILE *file, const Bin *bin, int index)
{
    fprintf(file,
            "{\"bin\": %d, \"calls\": %" PRIu64 ", \"bytes\": %" PRIu64 ", \"least_bytes\": %" PRIu64
            ", \"most_bytes\": %" PRIu64 ", \"seconds\": %.9f, \"least_seconds\": %.9f, \"most_seconds\": %.9f",
            index, load(&bin->calls), load(&bin->bytes), load(&bin->least_bytes) - 1, load(&bin->most_bytes),
            1e-9 * (double)load(&bin->ns), 1e-9 * (double)(load(&bin->least_ns) - 1),
            1e-9 * (double)load(&bin->most_ns));
    fprintf(file, ", \"wait_seconds\": %.9f}", 1e-9 * (double)load(&bin->wait_ns));
}

static void write_entry(FILE *file, const Entry *entry, uint64_t key)
{
    const char *between = "";
    fprintf(file, "{\"routine\": \"%s\", \"caller\": ", routine_names[key & 0xff]);
    write_string(file, hvdkit_caller_name((int)(key >> 8 & 0xff)));
    fprintf(file, ", \"op\": \"%s\", \"type\": \"%s\", \"processes\": %d, \"bins\": [",
            hvdkit_op_name((int)(key >> 16 & 0xff)), hvdkit_type_name((int)(key >> 24 & 0xff)), (int)(key >> 32));
    for (int index = 0; index < BINS; index++) {
        /* A call that another thread adds right now has no least value yet: it belongs to the next writing. */
        const Bin *bin = &entry->bins[index];
        if (load(&bin->calls) == 0 || load(&bin->least_bytes) == 0 || load(&bin->least_ns) == 0) continue;
        fprintf(file, "%s\n   ", between);
        write_bin(file, bin, index);
        between = ",";
    }
    fprintf(file, "]}");
}

static void write_all(FILE *file, const char *state)
{
    static const char *const levels[] = {"single", "funneled", "serialized", "multiple"};
    uint64_t end = paused_at_ns ? paused_at_ns : now();
    const char *between = "";
    fprintf(file, "{\"hvdkit\": \"" HVDKIT_VERSION "\", \"kind\": \"mpi-profile-rank\", \"schema\": 1,\n ");
    fprintf(file, "\"job\": \"%016" PRIx64 "\", \"rank\": %d, ", job, rank);
    fprintf(file, "\"size\": %d,\n \"state\": \"%s\", \"seconds\": %.9f, \"library\": ", size, state,
            1e-9 * (double)(end - started_ns - paused_ns));
    write_string(file, library);
    fprintf(file, ", \"threads\": \"%s\", \"wait_measured\": %s, \"lost\": %" PRIu64 ",\n \"calls\": [",
            levels[thread_level], measure_wait ? "true" : "false", load(&lost));
    for (int index = 0; index < ENTRIES; index++) {
        uint64_t key = load(&entries[index].key);
        if (key == 0) continue;
        fprintf(file, "%s\n  ", between);
        write_entry(file, &entries[index], key);
        between = ",";
    }
    fprintf(file, "]}\n");
}

/* The file is there whole or not at all; the caller holds the lock. */
static void write_file(const char *state)
{
    char path[PATH_BYTES + 64], temporary[PATH_BYTES + 64];
    static int failed;
    snprintf(path, sizeof path, "%s/mpi_profile.%d.json", directory, rank);
    snprintf(temporary, sizeof temporary, "%s/.mpi_profile.%d.json.%ld", directory, rank, (long)process);
    FILE *file = fopen(temporary, "we");
    int whole = file != NULL;
    if (file) {
        write_all(file, state);
        whole = !ferror(file);
        whole = fclose(file) == 0 && whole && rename(temporary, path) == 0;
    }
    if (!whole && !failed) {
        failed = 1;
        fprintf(stderr, "hvdkit: the MPI profile of rank %d cannot be written to %s: %s.\n", rank, path,
                strerror(errno));
        unlink(temporary);
    }
}

static void write_now_and_then(uint64_t time)
{
    uint64_t due = load(&next_write_ns);
    if (time < due ||
        !__atomic_compare_exchange_n(&next_write_ns, &due, time + every_ns, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        return;
    if (pthread_mutex_trylock(&writing) != 0) return;
    if (!finished) write_file("running");
    pthread_mutex_unlock(&writing);
}

Call hvdkit_begin(Routine routine, uint64_t bytes, MPI_Datatype type, const void *caller)
{
    Call call = {ROUTINE_NONE, 0, 0, 0, bytes, caller, 0, 0};
    if (!__atomic_load_n(&recording, __ATOMIC_RELAXED)) return call;
    call.routine = routine;
    call.type = hvdkit_type(type);
    call.start_ns = now();
    return call;
}

Call hvdkit_begin_collective(Routine routine, int blocking, uint64_t bytes, MPI_Op op, MPI_Datatype type,
                             MPI_Comm comm, const void *caller)
{
    Call call = {ROUTINE_NONE, 0, 0, 0, bytes, caller, 0, 0};
    int waits = blocking && measure_wait && routine != ROUTINE_Barrier;
    /* Ranks pause at different moments, and the barrier needs them all. */
    if (!__atomic_load_n(&recording, __ATOMIC_RELAXED)) {
        if (waits && started_ns) PMPI_Barrier(comm);
        return call;
    }
    call.routine = routine;
    call.op = hvdkit_op(op);
    call.type = hvdkit_type(type);
    PMPI_Comm_size(comm, &call.processes);
    call.start_ns = now();
    if (waits) {
        PMPI_Barrier(comm);
        call.wait_ns = now() - call.start_ns;
    }
    return call;
}

void hvdkit_end(const Call *call)
{
    if (call->routine == ROUTINE_NONE) return;
    uint64_t time = now(), ns = time - call->start_ns;
    uint64_t key = (uint64_t)call->routine | (uint64_t)hvdkit_caller(call->caller) << 8 | (uint64_t)call->op << 16 |
                   (uint64_t)call->type << 24 | (uint64_t)(uint32_t)call->processes << 32;
    Entry *entry = entry_of(key);
    if (entry) {
        Bin *bin = &entry->bins[bin_of(call->bytes)];
        add(&bin->bytes, call->bytes);
        add(&bin->ns, ns);
        if (call->wait_ns) add(&bin->wait_ns, call->wait_ns);
        lower(&bin->least_bytes, call->bytes);
        raise_to(&bin->most_bytes, call->bytes);
        lower(&bin->least_ns, ns);
        raise_to(&bin->most_ns, ns);
        add(&bin->calls, 1);
    } else
        add(&lost, 1);
    write_now_and_then(time);
}

static void ask_about_the_job(void)
{
    char text[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    struct timespec time;
    PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
    PMPI_Comm_size(MPI_COMM_WORLD, &size);
    PMPI_Query_thread(&thread_level);
    thread_level = thread_level <= MPI_THREAD_SINGLE       ? 0
                   : thread_level <= MPI_THREAD_FUNNELED   ? 1
                   : thread_level <= MPI_THREAD_SERIALIZED ? 2
                                                           : 3;
    PMPI_Get_library_version(text, &length);
    text[strcspn(text, ",\n")] = '\0'; /* what follows can name the host on which it was built */
    for (size_t from = 0, to = 0; text[from] && to < sizeof library - 1; from++)
        if (text[from] > ' ') library[to++] = text[from];
        else if (to && library[to - 1] != ' ') library[to++] = ' ';
    /* One number for all ranks tells the files of this job from older ones. */
    clock_gettime(CLOCK_REALTIME, &time);
    job = ((uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec) ^ (uint64_t)getpid() << 40;
    PMPI_Bcast(&job, (int)sizeof job, MPI_BYTE, 0, MPI_COMM_WORLD);
}

void hvdkit_started(void)
{
    const char *where = getenv("HVDKIT_MPI_PROFILE");
    const char *wait = getenv("HVDKIT_MPI_PROFILE_WAIT"), *every = getenv("HVDKIT_MPI_PROFILE_EVERY_S");
    if (!where || !*where || strlen(where) >= PATH_BYTES || started_ns) return;
    strcpy(directory, where);
    if (mkdir(directory, 0777) != 0 && errno != EEXIST)
        fprintf(stderr, "hvdkit: directory %s for the MPI profile cannot be made: %s.\n", directory, strerror(errno));
    measure_wait = wait && strcmp(wait, "1") == 0;
    double seconds = every ? atof(every) : EVERY_S;
    every_ns = (uint64_t)(1e9 * (seconds > 0.01 ? seconds : EVERY_S));
    process = getpid();
    ask_about_the_job();
    /* What this process starts from now on is no rank. */
    unsetenv("LD_PRELOAD");
    started_ns = now();
    next_write_ns = started_ns + every_ns;
    __atomic_store_n(&recording, 1, __ATOMIC_RELEASE);
}

void hvdkit_pause(int level)
{
    if (!started_ns || finished) return;
    if (level == 0 && !paused_at_ns) {
        paused_at_ns = now();
    } else if (level != 0 && paused_at_ns) {
        paused_ns += now() - paused_at_ns;
        paused_at_ns = 0;
    }
    __atomic_store_n(&recording, level != 0, __ATOMIC_RELAXED);
}

/* A child that was forked, such as a worker that loads data, has a copy of the record and leaves the file alone. */
void hvdkit_finish(const char *state)
{
    if (!started_ns || process != getpid()) return;
    pthread_mutex_lock(&writing);
    if (!finished) write_file(state);
    finished = 1;
    __atomic_store_n(&recording, 0, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&writing);
}

/* The process ends by itself without MPI_Finalize. */
__attribute__((destructor)) static void at_exit(void)
{
    hvdkit_finish("exited");
}
