/* Every MPI function that is recorded, under its own name: preloaded, these are found before those of the MPI, and pass
   each call on to it by its profiling name (PMPI_), as the standard means it to be done (MPI 4.1, section 15.2). */

#include "record.h"

#include <stdarg.h>

#define UNPACK(...) __VA_ARGS__
#define CALLER __builtin_extract_return_addr(__builtin_return_address(0))
#define BEGIN(routine, bytes, type) hvdkit_begin(ROUTINE_##routine, bytes, type, CALLER)
#define BEGIN_COLLECTIVE(routine, blocking, bytes, op, type)                                                          \
    hvdkit_begin_collective(ROUTINE_##routine, blocking, bytes, op, type, comm, CALLER)

/* A function that begins a call, passes it on and ends it: its name, what it calls; parameters; arguments */
#define PASS_ON(name, passed_to, begin, parameters, arguments)                                                        \
    int name(UNPACK parameters)                                                                                       \
    {                                                                                                                 \
        Call call = begin;                                                                                            \
        int result = passed_to(UNPACK arguments);                                                                     \
        hvdkit_end(&call);                                                                                            \
        return result;                                                                                                \
    }

#define COUNT int
#define OFFSET int
#define NAME(routine) MPI_##routine
#define PNAME(routine) PMPI_##routine
#define LOCAL(helper) helper
#include "data_calls.h"
#undef COUNT
#undef OFFSET
#undef NAME
#undef PNAME
#undef LOCAL

#if MPI_VERSION >= 4
#define COUNT MPI_Count
#define OFFSET MPI_Aint
#define NAME(routine) MPI_##routine##_c
#define PNAME(routine) PMPI_##routine##_c
#define LOCAL(helper) helper##_c
#include "data_calls.h"
#endif

/* Functions without a count: parameters; arguments */

#define PLAIN(routine, parameters, arguments)                                                                         \
    PASS_ON(MPI_##routine, PMPI_##routine, BEGIN(routine, 0, MPI_DATATYPE_NULL), parameters, arguments)

PLAIN(Probe, (int from, int tag, MPI_Comm comm, MPI_Status *status), (from, tag, comm, status))
PLAIN(Iprobe, (int from, int tag, MPI_Comm comm, int *flag, MPI_Status *status), (from, tag, comm, flag, status))
PLAIN(Mprobe, (int from, int tag, MPI_Comm comm, MPI_Message *message, MPI_Status *status),
      (from, tag, comm, message, status))
PLAIN(Improbe, (int from, int tag, MPI_Comm comm, int *flag, MPI_Message *message, MPI_Status *status),
      (from, tag, comm, flag, message, status))
PLAIN(Wait, (MPI_Request *request, MPI_Status *status), (request, status))
PLAIN(Waitall, (int count, MPI_Request requests[], MPI_Status statuses[]), (count, requests, statuses))
PLAIN(Waitany, (int count, MPI_Request requests[], int *index, MPI_Status *status), (count, requests, index, status))
PLAIN(Waitsome, (int count, MPI_Request requests[], int *done, int indices[], MPI_Status statuses[]),
      (count, requests, done, indices, statuses))
PLAIN(Test, (MPI_Request *request, int *flag, MPI_Status *status), (request, flag, status))
PLAIN(Testall, (int count, MPI_Request requests[], int *flag, MPI_Status statuses[]), (count, requests, flag, statuses))
PLAIN(Testany, (int count, MPI_Request requests[], int *index, int *flag, MPI_Status *status),
      (count, requests, index, flag, status))
PLAIN(Testsome, (int count, MPI_Request requests[], int *done, int indices[], MPI_Status statuses[]),
      (count, requests, done, indices, statuses))
PLAIN(Start, (MPI_Request * request), (request))
PLAIN(Startall, (int count, MPI_Request requests[]), (count, requests))
PLAIN(Win_fence, (int assertion, MPI_Win window), (assertion, window))

#define OVER_A_COMMUNICATOR(routine, blocking, parameters, arguments)                                                 \
    PASS_ON(MPI_##routine, PMPI_##routine,                                                                            \
            BEGIN_COLLECTIVE(routine, blocking, 0, MPI_OP_NULL, MPI_DATATYPE_NULL), parameters, arguments)

OVER_A_COMMUNICATOR(Barrier, 1, (MPI_Comm comm), (comm))
OVER_A_COMMUNICATOR(Ibarrier, 0, (MPI_Comm comm, MPI_Request *request), (comm, request))
OVER_A_COMMUNICATOR(Comm_dup, 0, (MPI_Comm comm, MPI_Comm *created), (comm, created))
OVER_A_COMMUNICATOR(Comm_split, 0, (MPI_Comm comm, int color, int key, MPI_Comm *created), (comm, color, key, created))
OVER_A_COMMUNICATOR(Comm_split_type, 0, (MPI_Comm comm, int type, int key, MPI_Info info, MPI_Comm *created),
                    (comm, type, key, info, created))
OVER_A_COMMUNICATOR(Comm_create, 0, (MPI_Comm comm, MPI_Group group, MPI_Comm *created), (comm, group, created))
OVER_A_COMMUNICATOR(Comm_create_group, 0, (MPI_Comm comm, MPI_Group group, int tag, MPI_Comm *created),
                    (comm, group, tag, created))

/* The life of the job */

int MPI_Init(int *count, char ***arguments)
{
    int status = PMPI_Init(count, arguments);
    if (status == MPI_SUCCESS) hvdkit_started();
    return status;
}

int MPI_Init_thread(int *count, char ***arguments, int required, int *provided)
{
    int status = PMPI_Init_thread(count, arguments, required, provided);
    if (status == MPI_SUCCESS) hvdkit_started();
    return status;
}

int MPI_Finalize(void)
{
    hvdkit_finish("finalized");
    return PMPI_Finalize();
}

int MPI_Abort(MPI_Comm comm, int code)
{
    hvdkit_finish("aborted");
    return PMPI_Abort(comm, code);
}

/* Level 0 pauses the recording in this process, any other one goes on with it (MPI 4.1, section 15.4). */
int MPI_Pcontrol(const int level, ...)
{
    hvdkit_pause(level);
    return MPI_SUCCESS;
}
