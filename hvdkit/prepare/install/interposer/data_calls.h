/* Wrappers of the functions that count elements, included by calls.c once for int and once for MPI_Count (MPI 4).

   COUNT, OFFSET           types of counts and displacements
   NAME(f), PNAME(f)       the function and what it calls; LOCAL(f) names a helper of this inclusion

   Bytes are what this rank hands in (what it gets, where it hands in nothing), as the parameters say it. */

static uint64_t LOCAL(total)(const COUNT counts[], MPI_Comm comm, MPI_Datatype type)
{
    int64_t elements = 0;
    for (int peer = 0, peers = hvdkit_peers(comm); peer < peers; peer++) elements += (int64_t)counts[peer];
    return hvdkit_bytes(elements, type);
}

static uint64_t LOCAL(total_of_types)(const COUNT counts[], MPI_Comm comm, const MPI_Datatype types[])
{
    uint64_t bytes = 0;
    for (int peer = 0, peers = hvdkit_peers(comm); peer < peers; peer++) bytes += hvdkit_bytes(counts[peer], types[peer]);
    return bytes;
}

/* Point to point */

#define TRANSFER(routine, bytes, type, parameters, arguments)                                                         \
    PASS_ON(NAME(routine), PNAME(routine), BEGIN(routine, bytes, type), parameters, arguments)

#define SEND(routine)                                                                                                 \
    TRANSFER(routine, to == MPI_PROC_NULL ? 0 : hvdkit_bytes(count, type), type,                                      \
             (const void *buffer, COUNT count, MPI_Datatype type, int to, int tag, MPI_Comm comm),                    \
             (buffer, count, type, to, tag, comm))

#define SEND_LATER(routine)                                                                                           \
    TRANSFER(routine, to == MPI_PROC_NULL ? 0 : hvdkit_bytes(count, type), type,                                      \
             (const void *buffer, COUNT count, MPI_Datatype type, int to, int tag, MPI_Comm comm,                     \
              MPI_Request *request),                                                                                  \
             (buffer, count, type, to, tag, comm, request))

SEND(Send)
SEND(Bsend)
SEND(Ssend)
SEND(Rsend)
SEND_LATER(Isend)
SEND_LATER(Ibsend)
SEND_LATER(Issend)
SEND_LATER(Irsend)

/* Bytes that came, which can be fewer than there was room for. */
static uint64_t LOCAL(received)(const MPI_Status *status, MPI_Datatype type)
{
    COUNT count = 0;
    if (PNAME(Get_count)(status, type, &count) != MPI_SUCCESS || count == MPI_UNDEFINED) return 0;
    return hvdkit_bytes(count, type);
}

#define RECEIVE(routine, parameters, arguments)                                                                       \
    int NAME(routine)(UNPACK parameters, MPI_Status * status)                                                         \
    {                                                                                                                 \
        MPI_Status own;                                                                                               \
        MPI_Status *seen = status == MPI_STATUS_IGNORE ? &own : status;                                               \
        Call call = BEGIN(routine, 0, type);                                                                          \
        int result = PNAME(routine)(UNPACK arguments, seen);                                                          \
        if (result == MPI_SUCCESS) call.bytes = LOCAL(received)(seen, type);                                          \
        hvdkit_end(&call);                                                                                            \
        return result;                                                                                                \
    }

RECEIVE(Recv, (void *buffer, COUNT count, MPI_Datatype type, int from, int tag, MPI_Comm comm),
        (buffer, count, type, from, tag, comm))
RECEIVE(Mrecv, (void *buffer, COUNT count, MPI_Datatype type, MPI_Message *message), (buffer, count, type, message))

/* How much comes is not known before the request completes: here bytes are the room that there is. */
TRANSFER(Irecv, from == MPI_PROC_NULL ? 0 : hvdkit_bytes(count, type), type,
         (void *buffer, COUNT count, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Request *request),
         (buffer, count, type, from, tag, comm, request))

TRANSFER(Imrecv, hvdkit_bytes(count, type), type,
         (void *buffer, COUNT count, MPI_Datatype type, MPI_Message *message, MPI_Request *request),
         (buffer, count, type, message, request))

TRANSFER(Sendrecv, to == MPI_PROC_NULL ? 0 : hvdkit_bytes(send_count, send_type), send_type,
         (const void *send, COUNT send_count, MPI_Datatype send_type, int to, int send_tag, void *receive,
          COUNT receive_count, MPI_Datatype receive_type, int from, int receive_tag, MPI_Comm comm, MPI_Status *status),
         (send, send_count, send_type, to, send_tag, receive, receive_count, receive_type, from, receive_tag, comm,
          status))

TRANSFER(Sendrecv_replace, to == MPI_PROC_NULL ? 0 : hvdkit_bytes(count, type), type,
         (void *buffer, COUNT count, MPI_Datatype type, int to, int send_tag, int from, int receive_tag, MPI_Comm comm,
          MPI_Status *status),
         (buffer, count, type, to, send_tag, from, receive_tag, comm, status))

TRANSFER(Put, hvdkit_bytes(own_count, own_type), own_type,
         (const void *own, COUNT own_count, MPI_Datatype own_type, int target, MPI_Aint at, COUNT count,
          MPI_Datatype type, MPI_Win window),
         (own, own_count, own_type, target, at, count, type, window))

TRANSFER(Get, hvdkit_bytes(own_count, own_type), own_type,
         (void *own, COUNT own_count, MPI_Datatype own_type, int target, MPI_Aint at, COUNT count, MPI_Datatype type,
          MPI_Win window),
         (own, own_count, own_type, target, at, count, type, window))

TRANSFER(Accumulate, hvdkit_bytes(own_count, own_type), own_type,
         (const void *own, COUNT own_count, MPI_Datatype own_type, int target, MPI_Aint at, COUNT count,
          MPI_Datatype type, MPI_Op op, MPI_Win window),
         (own, own_count, own_type, target, at, count, type, op, window))

/* Collectives, blocking and non-blocking: bytes, operation, type; parameters; arguments */

#define COLLECTIVE(routine, i_routine, bytes, op, type, parameters, arguments)                                        \
    PASS_ON(NAME(routine), PNAME(routine), BEGIN_COLLECTIVE(routine, 1, bytes, op, type), parameters, arguments)      \
    PASS_ON(NAME(i_routine), PNAME(i_routine), BEGIN_COLLECTIVE(i_routine, 0, bytes, op, type),                       \
            (UNPACK parameters, MPI_Request * request), (UNPACK arguments, request))

COLLECTIVE(Bcast, Ibcast, hvdkit_bytes(count, type), MPI_OP_NULL, type,
           (void *buffer, COUNT count, MPI_Datatype type, int root, MPI_Comm comm), (buffer, count, type, root, comm))

#define REDUCTION(routine, i_routine, bytes)                                                                          \
    COLLECTIVE(routine, i_routine, bytes, op, type,                                                                   \
               (const void *send, void *receive, COUNT count, MPI_Datatype type, MPI_Op op, MPI_Comm comm),           \
               (send, receive, count, type, op, comm))

REDUCTION(Allreduce, Iallreduce, hvdkit_bytes(count, type))
REDUCTION(Scan, Iscan, hvdkit_bytes(count, type))
REDUCTION(Exscan, Iexscan, hvdkit_bytes(count, type))

COLLECTIVE(Reduce, Ireduce, hvdkit_bytes(count, type), op, type,
           (const void *send, void *receive, COUNT count, MPI_Datatype type, MPI_Op op, int root, MPI_Comm comm),
           (send, receive, count, type, op, root, comm))

COLLECTIVE(Reduce_scatter, Ireduce_scatter, LOCAL(total)(counts, comm, type), op, type,
           (const void *send, void *receive, const COUNT counts[], MPI_Datatype type, MPI_Op op, MPI_Comm comm),
           (send, receive, counts, type, op, comm))

REDUCTION(Reduce_scatter_block, Ireduce_scatter_block, hvdkit_bytes((int64_t)count * hvdkit_peers(comm), type))

/* With MPI_IN_PLACE what this rank hands in lies in the receive buffer, and the other parameters say nothing. */
#define ITS_TYPE (send == MPI_IN_PLACE ? receive_type : send_type)

COLLECTIVE(Gather, Igather, hvdkit_bytes(send == MPI_IN_PLACE ? receive_count : send_count, ITS_TYPE), MPI_OP_NULL,
           ITS_TYPE,
           (const void *send, COUNT send_count, MPI_Datatype send_type, void *receive, COUNT receive_count,
            MPI_Datatype receive_type, int root, MPI_Comm comm),
           (send, send_count, send_type, receive, receive_count, receive_type, root, comm))

COLLECTIVE(Gatherv, Igatherv,
           hvdkit_bytes(send == MPI_IN_PLACE ? receive_counts[hvdkit_rank(comm)] : send_count, ITS_TYPE), MPI_OP_NULL,
           ITS_TYPE,
           (const void *send, COUNT send_count, MPI_Datatype send_type, void *receive, const COUNT receive_counts[],
            const OFFSET at[], MPI_Datatype receive_type, int root, MPI_Comm comm),
           (send, send_count, send_type, receive, receive_counts, at, receive_type, root, comm))

COLLECTIVE(Allgather, Iallgather, hvdkit_bytes(send == MPI_IN_PLACE ? receive_count : send_count, ITS_TYPE),
           MPI_OP_NULL, ITS_TYPE,
           (const void *send, COUNT send_count, MPI_Datatype send_type, void *receive, COUNT receive_count,
            MPI_Datatype receive_type, MPI_Comm comm),
           (send, send_count, send_type, receive, receive_count, receive_type, comm))

COLLECTIVE(Allgatherv, Iallgatherv,
           hvdkit_bytes(send == MPI_IN_PLACE ? receive_counts[hvdkit_rank(comm)] : send_count, ITS_TYPE), MPI_OP_NULL,
           ITS_TYPE,
           (const void *send, COUNT send_count, MPI_Datatype send_type, void *receive, const COUNT receive_counts[],
            const OFFSET at[], MPI_Datatype receive_type, MPI_Comm comm),
           (send, send_count, send_type, receive, receive_counts, at, receive_type, comm))

/* What this rank gets; at a root that keeps its part in place, the part that another rank gets. */
COLLECTIVE(Scatter, Iscatter,
           hvdkit_bytes(receive == MPI_IN_PLACE ? send_count : receive_count,
                        receive == MPI_IN_PLACE ? send_type : receive_type),
           MPI_OP_NULL, receive == MPI_IN_PLACE ? send_type : receive_type,
           (const void *send, COUNT send_count, MPI_Datatype send_type, void *receive, COUNT receive_count,
            MPI_Datatype receive_type, int root, MPI_Comm comm),
           (send, send_count, send_type, receive, receive_count, receive_type, root, comm))

COLLECTIVE(Scatterv, Iscatterv,
           hvdkit_bytes(receive == MPI_IN_PLACE ? send_counts[hvdkit_rank(comm)] : receive_count,
                        receive == MPI_IN_PLACE ? send_type : receive_type),
           MPI_OP_NULL, receive == MPI_IN_PLACE ? send_type : receive_type,
           (const void *send, const COUNT send_counts[], const OFFSET at[], MPI_Datatype send_type, void *receive,
            COUNT receive_count, MPI_Datatype receive_type, int root, MPI_Comm comm),
           (send, send_counts, at, send_type, receive, receive_count, receive_type, root, comm))

COLLECTIVE(Alltoall, Ialltoall,
           hvdkit_bytes((int64_t)(send == MPI_IN_PLACE ? receive_count : send_count) * hvdkit_peers(comm), ITS_TYPE),
           MPI_OP_NULL, ITS_TYPE,
           (const void *send, COUNT send_count, MPI_Datatype send_type, void *receive, COUNT receive_count,
            MPI_Datatype receive_type, MPI_Comm comm),
           (send, send_count, send_type, receive, receive_count, receive_type, comm))

COLLECTIVE(Alltoallv, Ialltoallv, LOCAL(total)(send == MPI_IN_PLACE ? receive_counts : send_counts, comm, ITS_TYPE),
           MPI_OP_NULL, ITS_TYPE,
           (const void *send, const COUNT send_counts[], const OFFSET send_at[], MPI_Datatype send_type, void *receive,
            const COUNT receive_counts[], const OFFSET receive_at[], MPI_Datatype receive_type, MPI_Comm comm),
           (send, send_counts, send_at, send_type, receive, receive_counts, receive_at, receive_type, comm))

COLLECTIVE(Alltoallw, Ialltoallw,
           LOCAL(total_of_types)(send == MPI_IN_PLACE ? receive_counts : send_counts, comm,
                                 send == MPI_IN_PLACE ? receive_types : send_types),
           MPI_OP_NULL, MPI_DATATYPE_NULL,
           (const void *send, const COUNT send_counts[], const OFFSET send_at[], const MPI_Datatype send_types[],
            void *receive, const COUNT receive_counts[], const OFFSET receive_at[],
            const MPI_Datatype receive_types[], MPI_Comm comm),
           (send, send_counts, send_at, send_types, receive, receive_counts, receive_at, receive_types, comm))

#undef ITS_TYPE
#undef COLLECTIVE
#undef REDUCTION
#undef SEND
#undef SEND_LATER
#undef RECEIVE
#undef TRANSFER
