/* What every wrapper of an MPI function shares: which functions there are, and how a call is put on record. */

#ifndef HVDKIT_RECORD_H
#define HVDKIT_RECORD_H

#include <mpi.h>
#include <stddef.h>
#include <stdint.h>

#define INTERNAL __attribute__((visibility("hidden")))

/* Every function that is recorded, by its name without MPI_. */
#define ROUTINES(X)                                                                                                   \
    X(Send) X(Bsend) X(Ssend) X(Rsend) X(Isend) X(Ibsend) X(Issend) X(Irsend) X(Recv) X(Irecv) X(Mrecv) X(Imrecv)     \
    X(Sendrecv) X(Sendrecv_replace) X(Probe) X(Iprobe) X(Mprobe) X(Improbe) X(Wait) X(Waitall) X(Waitany)             \
    X(Waitsome) X(Test) X(Testall) X(Testany) X(Testsome) X(Start) X(Startall) X(Barrier) X(Ibarrier) X(Bcast)        \
    X(Ibcast) X(Gather) X(Igather) X(Gatherv) X(Igatherv) X(Scatter) X(Iscatter) X(Scatterv) X(Iscatterv)             \
    X(Allgather) X(Iallgather) X(Allgatherv) X(Iallgatherv) X(Alltoall) X(Ialltoall) X(Alltoallv) X(Ialltoallv)       \
    X(Alltoallw) X(Ialltoallw) X(Reduce) X(Ireduce) X(Allreduce) X(Iallreduce) X(Reduce_scatter) X(Ireduce_scatter)   \
    X(Reduce_scatter_block) X(Ireduce_scatter_block) X(Scan) X(Iscan) X(Exscan) X(Iexscan) X(Put) X(Get)              \
    X(Accumulate) X(Win_fence) X(Comm_dup) X(Comm_split) X(Comm_split_type) X(Comm_create) X(Comm_create_group)

typedef enum {
    ROUTINE_NONE,
#define X(name) ROUTINE_##name,
    ROUTINES(X)
#undef X
} Routine;

/* A call under way; routine is ROUTINE_NONE while nothing is recorded. */
typedef struct {
    Routine routine;
    int op;             /* see hvdkit_op */
    int type;           /* see hvdkit_type */
    int processes;      /* of the communicator of a collective, else 0 */
    uint64_t bytes;     /* what this rank hands in, or is to get */
    const void *caller; /* address that it returns to */
    uint64_t start_ns;
    uint64_t wait_ns; /* until all ranks of the communicator were there; 0 where that is not measured */
} Call;

/* Begin a call that belongs to no collective. */
INTERNAL Call hvdkit_begin(Routine routine, uint64_t bytes, MPI_Datatype type, const void *caller);

/* Begin a collective; a blocking one waits for the other ranks first where that is to be measured. */
INTERNAL Call hvdkit_begin_collective(Routine routine, int blocking, uint64_t bytes, MPI_Op op, MPI_Datatype type,
                                      MPI_Comm comm, const void *caller);

/* Put it on record. */
INTERNAL void hvdkit_end(const Call *call);

/* MPI was initialised; it is about to be finalised; the job is about to be aborted; recording goes on or pauses. */
INTERNAL void hvdkit_started(void);
INTERNAL void hvdkit_finish(const char *state);
INTERNAL void hvdkit_pause(int level);

/* Bytes of some elements of a type; 0 for MPI_DATATYPE_NULL, which callers may pass where it is not looked at. */
INTERNAL uint64_t hvdkit_bytes(int64_t count, MPI_Datatype type);

/* Processes that this one exchanges data with in a collective, and its own rank. */
INTERNAL int hvdkit_peers(MPI_Comm comm);
INTERNAL int hvdkit_rank(MPI_Comm comm);

/* Index of a predefined operation or type in the names that are written; 0: none or another one. */
INTERNAL int hvdkit_op(MPI_Op op);
INTERNAL int hvdkit_type(MPI_Datatype type);
INTERNAL const char *hvdkit_op_name(int op);
INTERNAL const char *hvdkit_type_name(int type);

/* Index of the library or program that an address belongs to, < CALLERS, and its name. */
enum { CALLERS = 64 };
INTERNAL int hvdkit_caller(const void *address);
INTERNAL const char *hvdkit_caller_name(int caller);

#endif
