/* Names of the predefined operations and types. Their handles need not be constants, so they are compared in turn. */

#include "record.h"

/* The first ones are those of most calls. */
#define OPS(X)                                                                                                        \
    X(MPI_SUM) X(MPI_BAND) X(MPI_BOR) X(MPI_MIN) X(MPI_MAX) X(MPI_PROD) X(MPI_LAND) X(MPI_LOR) X(MPI_LXOR)            \
    X(MPI_BXOR) X(MPI_MINLOC) X(MPI_MAXLOC) X(MPI_REPLACE) X(MPI_NO_OP)

#define TYPES(X)                                                                                                      \
    X(MPI_LONG_LONG_INT) X(MPI_FLOAT) X(MPI_BYTE) X(MPI_INT) X(MPI_DOUBLE) X(MPI_UINT8_T) X(MPI_INT8_T)               \
    X(MPI_UINT16_T) X(MPI_INT16_T) X(MPI_INT32_T) X(MPI_INT64_T) X(MPI_UINT32_T) X(MPI_UINT64_T) X(MPI_C_BOOL)        \
    X(MPI_CHAR) X(MPI_SIGNED_CHAR) X(MPI_UNSIGNED_CHAR) X(MPI_SHORT) X(MPI_UNSIGNED_SHORT) X(MPI_UNSIGNED)            \
    X(MPI_LONG) X(MPI_UNSIGNED_LONG) X(MPI_UNSIGNED_LONG_LONG) X(MPI_LONG_DOUBLE) X(MPI_PACKED)

#define X(handle)                                                                                                     \
    index++;                                                                                                          \
    if (wanted == handle) return index;
int hvdkit_op(MPI_Op wanted)
{
    int index = 0;
    OPS(X)
    return 0;
}

int hvdkit_type(MPI_Datatype wanted)
{
    int index = 0;
    TYPES(X)
    return 0;
}
#undef X

#define X(handle) #handle,
const char *hvdkit_op_name(int op)
{
    static const char *const names[] = {"", OPS(X)};
    return names[op];
}

const char *hvdkit_type_name(int type)
{
    static const char *const names[] = {"", TYPES(X)};
    return names[type];
}
#undef X

uint64_t hvdkit_bytes(int64_t count, MPI_Datatype type)
{
    int size = 0;
    if (count <= 0 || type == MPI_DATATYPE_NULL || PMPI_Type_size(type, &size) != MPI_SUCCESS || size < 0) return 0;
    return (uint64_t)count * (uint64_t)size;
}

int hvdkit_rank(MPI_Comm comm)
{
    int rank = 0;
    PMPI_Comm_rank(comm, &rank);
    return rank;
}

int hvdkit_peers(MPI_Comm comm)
{
    int size = 0, between_groups = 0;
    PMPI_Comm_test_inter(comm, &between_groups);
    if (between_groups)
        PMPI_Comm_remote_size(comm, &size);
    else
        PMPI_Comm_size(comm, &size);
    return size;
}
