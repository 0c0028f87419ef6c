#include "standin.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <fcntl.h>
#include <nccl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

long setting(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atol(text) : otherwise;
}

[[noreturn]] void die(const std::string& why) {
  std::fprintf(stderr, "stand-in: %s\n", why.c_str());
  std::_Exit(86);
}

// Memory: device addresses are reserved and never mapped; their bytes lie at a fixed distance ------------------------

constexpr size_t ARENA = size_t(4) << 30;
constexpr size_t GUARD = 4096;
constexpr int FRESH = 0xA5, FENCE = 0x5C;

struct Memory {
  std::mutex mutex;
  char *addresses, *bytes;
  size_t used = 0;
  std::vector<char*> fences;

  Memory() {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    addresses = (char*)mmap(nullptr, ARENA, PROT_NONE, flags, -1, 0);
    bytes = (char*)mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (addresses == MAP_FAILED || bytes == MAP_FAILED) {
      die("no 4 GiB of address space for the device's memory");
    }
  }
};

Memory& memory() {
  static Memory* kept = new Memory;
  return *kept;
}

// Streams: work n begins when somebody waits for it, or late -----------------------------------------------------------

// Somebody is a wait, a query or a synchronisation, also of work that itself was waited for. What nobody waits for
// is held back for hundreds of milliseconds: so a wait that is missing becomes a wrong number.
struct Stream {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> work;
  uint64_t submitted = 0, wanted = 0, done = 0;
  std::mt19937 random;

  explicit Stream(unsigned number) : random(setting("STANDIN_SEED", 1) * 1000003 + getpid() * 17 + number) {
    std::thread([this] { run(); }).detach();
  }

  uint64_t submit(std::function<void()> what) {
    std::lock_guard<std::mutex> lock(mutex);
    work.push_back(std::move(what));
    changed.notify_all();
    return ++submitted;
  }

  bool query(uint64_t number) {
    std::lock_guard<std::mutex> lock(mutex);
    want(number);
    return done >= number;
  }

  void wait(uint64_t number) {
    std::unique_lock<std::mutex> lock(mutex);
    want(number);
    changed.wait(lock, [&] { return done >= number; });
  }

private:
  void want(uint64_t number) {
    if (number > wanted) {
      wanted = number;
      changed.notify_all();
    }
  }

  void run() {
    const long hold = setting("STANDIN_HOLD_MS", 400);
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return !work.empty(); });
      auto late = Clock::now() + std::chrono::milliseconds(hold + random() % (hold + 1));
      changed.wait_until(lock, late, [&] { return wanted > done; });
      auto what = std::move(work.front());
      work.pop_front();
      auto delay = microseconds(random() % 4 ? 0 : random() % 300);
      lock.unlock();
      std::this_thread::sleep_for(delay);
      what();
      lock.lock();
      ++done;
      changed.notify_all();
    }
  }
};

Stream* stream_of(cudaStream_t stream) {
  static Stream* standard = new Stream(0);
  return stream ? (Stream*)stream : standard;
}

// The work of a stream that was submitted when the event was recorded.
struct Event {
  std::mutex mutex;
  Stream* stream = nullptr;
  uint64_t number = 0;

  std::pair<Stream*, uint64_t> recorded() {
    std::lock_guard<std::mutex> lock(mutex);
    return {stream, number};
  }
};

thread_local int device = 0;

} // namespace

namespace standin {

bool on_device(const void* address) {
  auto* at = (const char*)address;
  return at >= memory().addresses && at < memory().addresses + ARENA;
}

void* bytes(const void* address) {
  return on_device(address) ? memory().bytes + ((const char*)address - memory().addresses) : (void*)address;
}

void submit(cudaStream_t stream, std::function<void()> work) { stream_of(stream)->submit(std::move(work)); }

int overruns() {
  std::lock_guard<std::mutex> lock(memory().mutex);
  int found = 0;
  for (char* fence : memory().fences) {
    found += std::any_of(fence, fence + GUARD, [](char byte) { return byte != (char)FENCE; });
    std::memset(fence, FENCE, GUARD);
  }
  return found;
}

} // namespace standin

using standin::bytes;
using standin::on_device;

// CUDA's runtime -------------------------------------------------------------------------------------------------------

extern "C" {

cudaError_t cudaMalloc(void** address, size_t size) {
  auto& all = memory();
  std::lock_guard<std::mutex> lock(all.mutex);
  size_t room = (size + 511) / 512 * 512;
  if (all.used + room + 512 + GUARD > ARENA) {
    return cudaErrorMemoryAllocation;
  }
  *address = all.addresses + all.used;
  std::memset(all.bytes + all.used, FRESH, size);
  // The fence begins at the last byte's neighbour.
  std::memset(all.bytes + all.used + size, FENCE, GUARD);
  all.fences.push_back(all.bytes + all.used + size);
  all.used += (size + GUARD + 511) / 512 * 512;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* number) {
  *number = device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int number) {
  device = number;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int*, int* greatest) {
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  static std::atomic<unsigned> count{0};
  *stream = (cudaStream_t) new Stream(++count);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  auto* all = stream_of(stream);
  all->wait(all->submit([] {}));
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = (cudaEvent_t) new Event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  auto* recorded = (Event*)event;
  std::lock_guard<std::mutex> lock(recorded->mutex);
  recorded->stream = stream_of(stream);
  recorded->number = recorded->stream->submit([] {});
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  auto [stream, number] = ((Event*)event)->recorded();
  return !stream || stream->query(number) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  auto [stream, number] = ((Event*)event)->recorded();
  if (stream) {
    stream->wait(number);
  }
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  auto [other, number] = ((Event*)event)->recorded();
  if (other && !setting("STANDIN_NO_WAIT_EVENT", 0)) {
    standin::submit(stream, [other = other, number = number] { other->wait(number); });
  }
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind, cudaStream_t stream) {
  bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if (size && (on_device(to) != to_device || on_device(from) != from_device)) {
    return cudaErrorInvalidValue;
  }
  // Pageable memory of the host is read before the call returns, and has been written when it returns.
  std::vector<char> staged;
  if (!from_device) {
    staged.assign((const char*)from, (const char*)from + size);
  }
  standin::submit(stream, [=, staged = std::move(staged)] {
    std::memmove(bytes(to), from_device ? bytes(from) : staged.data(), size);
  });
  return to_device ? cudaSuccess : cudaStreamSynchronize(stream);
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidValue ? "invalid argument" : error == cudaSuccess ? "no error" : "CUDA error";
}

} // extern "C"

// NCCL: messages between processes in boxes of shared memory ----------------------------------------------------------

namespace {

constexpr int RANKS = 8;
constexpr size_t PIECE = 1 << 16;
constexpr std::chrono::milliseconds GONE(200); // without a sign of a rank: on a busy machine a lock may be late

// What an operation is; both ends of a message must agree on it.
struct Operation {
  char name[24];
  size_t count;
  int type, reduction, root;
};

struct Box {
  std::atomic<int> full;
  Operation operation;
  size_t size;
  char data[PIECE];
};

// One file a communicator. A rank locks its byte of it, which the kernel unlocks when the process ends.
struct Shared {
  std::atomic<int> joined;
  std::atomic<int> gone[RANKS];
  Box boxes[RANKS][RANKS];
};

struct Message {
  int peer;
  char* data;
  size_t size, moved = 0;
};

size_t width(ncclDataType_t type) {
  switch (type) {
  case ncclInt8:
  case ncclUint8:
    return 1;
  case ncclFloat16:
  case ncclBfloat16:
    return 2;
  case ncclInt32:
  case ncclFloat32:
    return 4;
  case ncclInt64:
  case ncclFloat64:
    return 8;
  default:
    die("no such type: " + std::to_string(type));
  }
}

template <typename T> double number(T value) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half2float(value);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __bfloat162float(value);
  } else {
    return (double)value;
  }
}

// Parts are those of the ranks, in order. Rounded after each step, as NCCL does.
template <typename T> void combine(T* out, const std::vector<std::vector<char>>& parts, size_t count, int reduction) {
  for (size_t i = 0; i < count; ++i) {
    T value = ((const T*)parts[0].data())[i];
    for (size_t rank = 1; rank < parts.size(); ++rank) {
      T next = ((const T*)parts[rank].data())[i];
      if constexpr (std::is_integral_v<T>) {
        value = reduction == ncclProd  ? value * next
                : reduction == ncclMin ? std::min(value, next)
                : reduction == ncclMax ? std::max(value, next)
                                       : value + next;
      } else {
        double a = number(value), b = number(next);
        value = (T)(float)0;
        double made = reduction == ncclProd  ? a * b
                      : reduction == ncclMin ? std::min(a, b)
                      : reduction == ncclMax ? std::max(a, b)
                                             : a + b;
        value = std::is_same_v<T, double> ? (T)made : (T)(float)made;
      }
    }
    if (reduction == ncclAvg) {
      if constexpr (std::is_integral_v<T>) {
        value = value / (T)parts.size();
      } else {
        double mean = number(value) / parts.size();
        value = std::is_same_v<T, double> ? (T)mean : (T)(float)mean;
      }
    }
    out[i] = value;
  }
}

void combine(char* out, const std::vector<std::vector<char>>& parts, size_t count, int type, int reduction) {
  switch (type) {
  case ncclInt8:
    return combine((int8_t*)out, parts, count, reduction);
  case ncclUint8:
    return combine((uint8_t*)out, parts, count, reduction);
  case ncclInt32:
    return combine((int32_t*)out, parts, count, reduction);
  case ncclInt64:
    return combine((int64_t*)out, parts, count, reduction);
  case ncclFloat16:
    return combine((__half*)out, parts, count, reduction);
  case ncclBfloat16:
    return combine((__nv_bfloat16*)out, parts, count, reduction);
  case ncclFloat32:
    return combine((float*)out, parts, count, reduction);
  case ncclFloat64:
    return combine((double*)out, parts, count, reduction);
  }
}

std::string text(const Operation& operation) {
  return std::string(operation.name) + " of " + std::to_string(operation.count) + " elements, type " +
         std::to_string(operation.type) + ", reduction " + std::to_string(operation.reduction) + ", root " +
         std::to_string(operation.root);
}

} // namespace

struct ncclComm {
  int rank, size, file;
  Shared* shared;
  std::atomic<bool> aborted{false}, closed{false};
  std::atomic<ncclResult_t> error{ncclSuccess};

  // Runs on a stream's thread; false when it was aborted.
  bool exchange(const Operation& operation, std::vector<Message> out, std::vector<Message> in) {
    static std::atomic<long> count{0};
    const long now = ++count;
    if (now == setting("STANDIN_DIE_AT", -1)) {
      kill(getpid(), SIGKILL);
    }
    if (now == setting("STANDIN_REMOTE_ERROR_AT", -1)) {
      error = ncclRemoteError;
    }
    for (auto seen = Clock::now(); error == ncclSuccess && !aborted;) {
      bool moved = step(operation, out, true), left = false;
      moved |= step(operation, in, false);
      for (auto* messages : {&out, &in}) {
        for (auto& message : *messages) {
          left |= message.moved < message.size;
        }
      }
      if (!left) {
        return true;
      }
      if (moved || !(lost_one(out) || lost_one(in))) {
        seen = Clock::now();
      }
      if (moved) {
        continue;
      }
      if (Clock::now() - seen > GONE && !setting("STANDIN_NO_REMOTE_ERROR", 0)) {
        // As NCCL: the operation hangs, and says so only to who asks.
        error = ncclRemoteError;
      }
      std::this_thread::sleep_for(microseconds(20));
    }
    while (!aborted) {
      std::this_thread::sleep_for(microseconds(500));
    }
    return false;
  }

private:
  bool step(const Operation& operation, std::vector<Message>& messages, bool out) {
    bool moved = false, seen[RANKS] = {};
    for (auto& message : messages) {
      if (message.moved == message.size || seen[message.peer]) {
        continue;
      }
      seen[message.peer] = true; // messages to one peer keep their order
      auto& box = out ? shared->boxes[rank][message.peer] : shared->boxes[message.peer][rank];
      if (box.full.load() != (out ? 0 : 1)) {
        continue;
      }
      if (out) {
        box.operation = operation;
        box.size = std::min(PIECE, message.size - message.moved);
        std::memcpy(box.data, message.data + message.moved, box.size);
      } else {
        auto& theirs = box.operation;
        bool same = !std::strcmp(theirs.name, operation.name) && theirs.count == operation.count &&
                    theirs.type == operation.type && theirs.reduction == operation.reduction &&
                    theirs.root == operation.root && box.size <= message.size - message.moved;
        if (!same) {
          die("rank " + std::to_string(rank) + " runs " + text(operation) + ", rank " + std::to_string(message.peer) +
              " " + text(theirs) + ": on GPUs this hangs or corrupts memory");
        }
        std::memcpy(message.data + message.moved, box.data, box.size);
      }
      message.moved += box.size;
      box.full.store(out ? 1 : 0);
      moved = true;
    }
    return moved;
  }

  bool lost_one(const std::vector<Message>& messages) {
    return std::any_of(messages.begin(), messages.end(), [&](const Message& message) {
      if (message.moved == message.size || message.peer == rank) {
        return false;
      }
      struct flock lock = {F_WRLCK, SEEK_SET, message.peer, 1, 0};
      fcntl(file, F_GETLK, &lock);
      return shared->gone[message.peer] || lock.l_type == F_UNLCK;
    });
  }
};

namespace {

// One call of NCCL, as it is kept until its group ends.
struct Call {
  Operation operation;
  const void* from;
  void* to;
  int peer;
  ncclComm_t comm;
  cudaStream_t stream;
};

thread_local int depth = 0;
thread_local std::vector<Call> group;

// A collective; the result is written when all parts are there, so that it may overlap with what is sent.
bool collective(const Call& call) {
  auto& [name, count, type, reduction, root] = call.operation;
  auto& comm = *call.comm;
  const size_t size = count * width((ncclDataType_t)type);
  auto is = [&, name = (const char*)name](const char* other) { return !std::strcmp(name, other); };
  char* from = (char*)bytes(call.from);
  char* to = (char*)bytes(call.to);
  const bool scatter = is("ncclReduceScatter"), rooted = is("ncclBroadcast"), reduce = is("ncclReduce");
  std::vector<std::vector<char>> parts(comm.size, std::vector<char>(size));
  std::vector<Message> out, in;
  for (int peer = 0; peer < comm.size; ++peer) {
    if (!rooted || comm.rank == root) {
      if (!reduce || peer == root) {
        out.push_back({peer, from + (scatter ? peer * size : 0), size});
      }
    }
    if ((!rooted || peer == root) && (!reduce || comm.rank == root)) {
      in.push_back({peer, parts[peer].data(), size});
    }
  }
  if (size == 0 || !comm.exchange(call.operation, out, in)) {
    return size == 0;
  }
  if (rooted) {
    std::memcpy(to, parts[root].data(), size);
  } else if (is("ncclAllGather")) {
    for (int peer = 0; peer < comm.size; ++peer) {
      std::memcpy(to + peer * size, parts[peer].data(), size);
    }
  } else if (!reduce || comm.rank == root) {
    combine(to, parts, count, type, reduction);
  }
  return true;
}

// All sends and receives of a group at once, then its collectives one after the other.
void run(const std::vector<Call>& calls) {
  std::vector<Message> out, in;
  for (auto& call : calls) {
    auto size = call.operation.count * width((ncclDataType_t)call.operation.type);
    if (!std::strcmp(call.operation.name, "ncclSend")) {
      out.push_back({call.peer, (char*)bytes(call.from), size});
    } else if (!std::strcmp(call.operation.name, "ncclRecv")) {
      in.push_back({call.peer, (char*)bytes(call.to), size});
    }
  }
  Operation points = {"send and receive", 0, 0, 0, 0};
  if ((!out.empty() || !in.empty()) && !calls[0].comm->exchange(points, out, in)) {
    return;
  }
  for (auto& call : calls) {
    if (call.peer < 0 && !collective(call)) {
      return;
    }
  }
}

void check_open(ncclComm_t comm, const char* name) {
  if (comm && comm->closed) {
    die(std::string(name) + " uses a communicator after it was aborted or destroyed: on GPUs its memory is gone");
  }
}

ncclResult_t leave(ncclComm_t comm, bool abort) {
  if (comm == nullptr) {
    return ncclSuccess;
  }
  check_open(comm, "ncclCommAbort or ncclCommDestroy");
  comm->aborted = comm->aborted || abort;
  comm->closed = true;
  comm->shared->gone[comm->rank] = 1;
  return ncclSuccess;
}

ncclResult_t enqueue(const char* name, const void* from, void* to, size_t count, int type, int reduction, int root,
                     int peer, ncclComm_t comm, cudaStream_t stream) {
  bool reads = std::strcmp(name, "ncclRecv"), writes = std::strcmp(name, "ncclSend");
  check_open(comm, name);
  if (comm == nullptr || (count && ((reads && !on_device(from)) || (writes && !on_device(to))))) {
    return ncclInvalidArgument;
  }
  Call call = {{"", count, type, reduction, root}, from, to, peer, comm, stream};
  std::snprintf(call.operation.name, sizeof(call.operation.name), "%s", name);
  ncclGroupStart();
  group.push_back(call);
  return ncclGroupEnd();
}

} // namespace

extern "C" {

const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclRemoteError ? "remote process exited or there was a network error"
         : result == ncclSuccess   ? "no error"
                                   : "invalid argument";
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::memset(id, 0, sizeof(*id));
  std::snprintf(id->internal, sizeof(id->internal), "/nccl-stand-in-%d-%08x", getpid(), std::random_device()());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* made, int size, ncclUniqueId id, int rank) {
  int file = shm_open(id.internal, O_CREAT | O_RDWR, 0600);
  if (size > RANKS || file < 0 || ftruncate(file, sizeof(Shared))) {
    return ncclSystemError;
  }
  auto* shared = (Shared*)mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  struct flock lock = {F_WRLCK, SEEK_SET, rank, 1, 0};
  if (shared == MAP_FAILED || fcntl(file, F_SETLK, &lock)) {
    return ncclSystemError;
  }
  ++shared->joined;
  for (auto late = Clock::now() + std::chrono::seconds(30); shared->joined < size;) {
    if (Clock::now() > late) {
      shm_unlink(id.internal);
      return ncclSystemError;
    }
    std::this_thread::sleep_for(microseconds(200));
  }
  shm_unlink(id.internal);
  *made = new ncclComm{rank, size, file, shared};
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) { return leave(comm, false); }

ncclResult_t ncclCommAbort(ncclComm_t comm) { return leave(comm, true); }

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  check_open(comm, "ncclCommGetAsyncError");
  if (comm == nullptr) {
    return ncclInvalidArgument;
  }
  *error = comm->error;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (--depth == 0 && !group.empty()) {
    // Horovod's groups have one communicator and one stream.
    auto stream = group[0].stream;
    standin::submit(stream, [calls = std::exchange(group, {})] { run(calls); });
  }
  return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t reduction,
                           ncclComm_t comm, cudaStream_t stream) {
  return enqueue("ncclAllReduce", from, to, count, type, reduction, 0, -1, comm, stream);
}

ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t reduction, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return enqueue("ncclReduce", from, to, count, type, reduction, root, -1, comm, stream);
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return enqueue("ncclBroadcast", from, to, count, type, 0, root, -1, comm, stream);
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return enqueue("ncclAllGather", from, to, count, type, 0, 0, -1, comm, stream);
}

ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t reduction,
                               ncclComm_t comm, cudaStream_t stream) {
  return enqueue("ncclReduceScatter", from, to, count, type, reduction, 0, -1, comm, stream);
}

ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return enqueue("ncclSend", from, nullptr, count, type, 0, 0, peer, comm, stream);
}

ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return enqueue("ncclRecv", nullptr, to, count, type, 0, 0, peer, comm, stream);
}

} // extern "C"
