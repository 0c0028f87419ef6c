// Drives Horovod's C++ core as a framework does, on one rank: tensors in the device's memory, filled by a stream that
// Horovod must wait for. Each case prints "case<TAB>wrong<TAB>elements<TAB>what"; wrong is -1 for an error.
#include "standin.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mpi.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "horovod/common/operations.h"

using namespace horovod::common;
using Shape = std::vector<int64_t>;

// Ranks of one machine pretend to be on several: HARNESS_HOSTS=2,1 has ranks 0 and 1 on the first, 2 on the second.
extern "C" int MPI_Comm_split_type(MPI_Comm comm, int type, int key, MPI_Info info, MPI_Comm* made) {
  const char* hosts = std::getenv("HARNESS_HOSTS");
  if (type != MPI_COMM_TYPE_SHARED || hosts == nullptr) {
    return PMPI_Comm_split_type(comm, type, key, info, made);
  }
  int rank, host = 0;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  for (int last = std::atoi(hosts); rank >= last; ++host) {
    hosts = std::strchr(hosts, ',') + 1;
    last += std::atoi(hosts);
  }
  return PMPI_Comm_split(comm, host, key, made);
}

namespace {

int rank, device;
cudaStream_t compute, allocation; // streams of the framework: of its kernels, and of the thread that runs Horovod
bool async_completion;

// Elements --------------------------------------------------------------------------------------------------------

void put(DataType type, void* data, int64_t i, double value) {
  switch (type) {
  case HOROVOD_UINT8:
    ((uint8_t*)data)[i] = (uint8_t)value;
    break;
  case HOROVOD_INT8:
    ((int8_t*)data)[i] = (int8_t)value;
    break;
  case HOROVOD_INT32:
    ((int32_t*)data)[i] = (int32_t)value;
    break;
  case HOROVOD_INT64:
    ((int64_t*)data)[i] = (int64_t)value;
    break;
  case HOROVOD_FLOAT16:
    ((__half*)data)[i] = __float2half((float)value);
    break;
  case HOROVOD_BFLOAT16:
    ((__nv_bfloat16*)data)[i] = __float2bfloat16((float)value);
    break;
  case HOROVOD_FLOAT32:
    ((float*)data)[i] = (float)value;
    break;
  case HOROVOD_FLOAT64:
    ((double*)data)[i] = value;
    break;
  default:
    std::abort();
  }
}

double get(DataType type, const void* data, int64_t i) {
  switch (type) {
  case HOROVOD_UINT8:
    return ((const uint8_t*)data)[i];
  case HOROVOD_INT8:
    return ((const int8_t*)data)[i];
  case HOROVOD_INT32:
    return ((const int32_t*)data)[i];
  case HOROVOD_INT64:
    return (double)((const int64_t*)data)[i];
  case HOROVOD_FLOAT16:
    return __half2float(((const __half*)data)[i]);
  case HOROVOD_BFLOAT16:
    return __bfloat162float(((const __nv_bfloat16*)data)[i]);
  case HOROVOD_FLOAT32:
    return ((const float*)data)[i];
  case HOROVOD_FLOAT64:
    return ((const double*)data)[i];
  default:
    std::abort();
  }
}

double tolerance(DataType type) {
  switch (type) {
  case HOROVOD_FLOAT16:
    return 2e-3;
  case HOROVOD_FLOAT32:
    return 1e-6;
  case HOROVOD_FLOAT64:
    return 1e-14;
  default:
    return 0;
  }
}

// What rank r has at element i of its tensor t: small, so that every type's sums are exact.
double value(int r, int t, int64_t i) { return 1 + (double)((i * 7 + r * 3 + t * 5) % 11); }

// A framework's tensors ---------------------------------------------------------------------------------------------

struct Buffer : Tensor {
  DataType type;
  TensorShape form;
  void* address;
  bool host;

  Buffer(DataType type, const Shape& shape, bool host = false) : type(type), form(shape), host(host) {
    if (host) {
      address = std::calloc(std::max<int64_t>(size(), 1), 1);
    } else if (cudaMalloc(&address, size())) {
      std::abort();
    }
  }

  const DataType dtype() const override { return type; }
  const TensorShape shape() const override { return form; }
  const void* data() const override { return address; }
  int64_t size() const override { return form.num_elements() * DataType_Size(type); }
};

using Held = std::shared_ptr<Buffer>;

struct Recorded : ReadyEvent {
  cudaEvent_t recorded;

  explicit Recorded(cudaStream_t stream) {
    cudaEventCreateWithFlags(&recorded, cudaEventDisableTiming);
    cudaEventRecord(recorded, stream);
  }

  bool Ready() const override { return cudaEventSynchronize(recorded) == cudaSuccess; }
  gpuEvent_t event() const override { return recorded; }
};

// The block's former user still writes to it on that stream: whoever takes it must wait.
Held made(DataType type, const Shape& shape, cudaStream_t stream) {
  auto buffer = std::make_shared<Buffer>(type, shape);
  standin::submit(stream, [=] { std::memset(standin::bytes(buffer->address), 0x3C, buffer->size()); });
  return buffer;
}

Held filled(DataType type, const Shape& shape, int t, double modulus = 0) {
  auto buffer = made(type, shape, compute);
  standin::submit(compute, [=] {
    for (int64_t i = 0; i < buffer->form.num_elements(); ++i) {
      double x = value(rank, t, i);
      put(type, standin::bytes(buffer->address), i, modulus ? 1 + std::fmod(x, modulus) : x);
    }
  });
  return buffer;
}

struct Block : PersistentBuffer {
  Buffer buffer;
  explicit Block(int64_t size) : buffer(HOROVOD_UINT8, {size}) {}
  const void* AccessData(std::shared_ptr<OpContext>) const override { return buffer.address; }
};

struct Context : OpContext {
  DataType type;
  bool splits; // output 1 is what an alltoall received from each rank, on the host
  std::vector<Held> outputs;

  explicit Context(DataType type, bool splits = false) : type(type), splits(splits) {}

  Status AllocatePersistent(int64_t bytes, std::shared_ptr<PersistentBuffer>* tensor) override {
    *tensor = std::make_shared<Block>(bytes);
    return Status::OK();
  }
  Status AllocateOutput(TensorShape shape, std::shared_ptr<Tensor>* tensor, std::shared_ptr<ReadyEvent>* event) override {
    return AllocateOutput(0, shape, tensor, event);
  }
  Status AllocateOutput(int index, TensorShape shape, std::shared_ptr<Tensor>* tensor,
                        std::shared_ptr<ReadyEvent>* event) override {
    outputs.resize(std::max<size_t>(outputs.size(), index + 1));
    const bool host = splits && index == 1;
    outputs[index] = host ? std::make_shared<Buffer>(HOROVOD_INT32, shape.to_vector(), true)
                          : made(type, shape.to_vector(), allocation);
    *tensor = outputs[index];
    if (!host && event) {
      *event = std::make_shared<Recorded>(allocation);
    } else if (!host) {
      cudaStreamSynchronize(allocation);
    }
    return Status::OK();
  }
  Status AllocateZeros(int64_t count, DataType type, std::shared_ptr<Tensor>* tensor) override {
    auto buffer = made(type, {count}, allocation);
    standin::submit(allocation, [=] { std::memset(standin::bytes(buffer->address), 0, buffer->size()); });
    cudaStreamSynchronize(allocation);
    *tensor = buffer;
    return Status::OK();
  }
  Framework framework() const override { return PYTORCH; }
};

// Cases -------------------------------------------------------------------------------------------------------------

[[noreturn]] void leave(int code) {
  std::fflush(nullptr);
  _exit(code); // the streams' threads never end
}

struct Case {
  std::string name, error;
  std::atomic<int> open{0};
  std::mutex mutex;
  int64_t wrong = 0, elements = 0;
  std::string first;
  int count = 0;

  explicit Case(std::string name) : name(std::move(name)) {}

  std::string unique() { return name + "." + std::to_string(count++); }

  ReadyEventList ready() {
    ReadyEventList list;
    list.AddReadyEvent(std::make_shared<Recorded>(compute));
    return list;
  }

  StatusCallback callback() {
    ++open;
    return [this](const Status& status) {
      if (status.event.event) {
        cudaStreamWaitEvent(compute, *status.event.event, 0);
      }
      failed(status);
      --open;
    };
  }

  // Of a request: one that was refused is never called back.
  void sent(const Status& status, int requests = 1) {
    if (!status.ok()) {
      failed(status);
      open -= requests;
    }
  }

  void failed(const Status& status) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!status.ok() && error.empty()) {
      error = status.reason();
    }
  }

  void wait() {
    const long patience = std::getenv("HARNESS_PATIENCE") ? std::atol(std::getenv("HARNESS_PATIENCE")) : 60;
    auto late = std::chrono::steady_clock::now() + std::chrono::seconds(patience);
    while (open > 0) {
      if (std::chrono::steady_clock::now() > late) {
        std::printf("%s\t-1\t0\thung: %d requests are open\n", name.c_str(), open.load());
        leave(3);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }

  // Looked at as soon as Horovod says that it is there, without waiting for any stream unless completion is async.
  void check(const Held& buffer, const Shape& shape, const std::function<double(int64_t)>& expected, bool exact = true) {
    if (!error.empty()) {
      return;
    }
    if (buffer == nullptr || buffer->form.to_vector() != shape) {
      ++wrong;
      first = "the output has shape " + (buffer ? buffer->form.DebugString() : "none");
      return;
    }
    cudaStreamSynchronize(allocation); // a former user who was not waited for has written by now
    std::vector<char> copy(buffer->size());
    if (buffer->host || !async_completion) {
      std::memcpy(copy.data(), standin::bytes(buffer->address), copy.size());
    } else {
      cudaMemcpyAsync(copy.data(), buffer->address, copy.size(), cudaMemcpyDeviceToHost, compute);
    }
    for (int64_t i = 0; i < buffer->form.num_elements(); ++i) {
      double seen = get(buffer->type, copy.data(), i), wanted = expected(i);
      ++elements;
      if (!(std::fabs(seen - wanted) <= (exact ? 0 : tolerance(buffer->type)) * std::fabs(wanted)) && !wrong++) {
        first = "element " + std::to_string(i) + " is " + std::to_string(seen) + ", not " + std::to_string(wanted);
      }
    }
  }

  ~Case() {
    wait();
    if (int written = standin::overruns()) {
      wrong += written;
      first += " memory was written past the end of " + std::to_string(written) + " allocations";
    }
    std::printf("%s\t%ld\t%ld\t%s\n", name.c_str(), error.empty() ? wrong : -1, elements,
                (error.empty() ? first : error).c_str());
    std::fflush(stdout);
  }
};

// The ranks of a process set, by their global rank; ``me`` is -1 on the others.
struct Group {
  int32_t id = 0;
  std::vector<int> ranks;
  int me = -1;
};

struct Reduction {
  ReduceOp op = SUM;
  double prescale = 1, postscale = 1;
  bool grouped = false, in_place = false;
  std::function<double(size_t, int64_t)> expected = nullptr; // of element i of tensor t, where it is no plain reduction
};

// Several requests of one case, as Horovod's functions for groups take them.
struct Requests {
  Case& result;
  std::vector<std::shared_ptr<OpContext>> contexts;
  std::vector<std::shared_ptr<Tensor>> tensors, outputs;
  std::vector<ReadyEventList> events;
  std::vector<std::string> names;
  std::vector<StatusCallback> callbacks;
  std::vector<Held> results;

  void add(std::shared_ptr<OpContext> context, Held input, Held output) {
    contexts.push_back(std::move(context));
    tensors.push_back(input);
    outputs.push_back(output);
    results.push_back(output);
    events.push_back(result.ready());
    names.push_back(result.unique());
    callbacks.push_back(result.callback());
  }
};

void allreduce(const std::string& name, const Group& on, DataType type, const std::vector<int64_t>& sizes,
               const Reduction& how = {}) {
  if (on.me < 0) {
    return;
  }
  Case result(name);
  Requests all{result};
  const double modulus = how.op == PRODUCT ? 2 : 0;
  for (size_t t = 0; t < sizes.size(); ++t) {
    auto input = filled(type, {sizes[t]}, t, modulus);
    all.add(std::make_shared<Context>(type), input, how.in_place ? input : made(type, {sizes[t]}, compute));
  }
  if (how.grouped) {
    result.sent(EnqueueTensorAllreduces(all.contexts, all.tensors, all.outputs, all.events, all.names, device,
                                        all.callbacks, how.op, how.prescale, how.postscale, on.id),
                (int)sizes.size());
  }
  for (size_t t = 0; t < sizes.size() && !how.grouped; ++t) {
    result.sent(EnqueueTensorAllreduce(all.contexts[t], all.tensors[t], all.outputs[t], all.events[t], all.names[t],
                                       device, all.callbacks[t], how.op, how.prescale, how.postscale, on.id));
  }
  result.wait();
  for (size_t t = 0; t < sizes.size(); ++t) {
    auto expected = [&](int64_t i) {
      if (how.expected) {
        return how.expected(t, i);
      }
      double made = how.op == PRODUCT ? 1 : how.op == MIN ? 1e9 : 0;
      for (int r : on.ranks) {
        double x = how.prescale * (modulus ? 1 + std::fmod(value(r, t, i), modulus) : value(r, t, i));
        made = how.op == PRODUCT ? made * x
               : how.op == MIN   ? std::min(made, x)
               : how.op == MAX   ? std::max(made, x)
                                 : made + x;
      }
      made *= how.postscale / (how.op == AVERAGE ? on.ranks.size() : 1);
      return tolerance(type) ? made : std::trunc(made + 1e-9);
    };
    result.check(all.results[t], {sizes[t]}, expected, how.op != AVERAGE && how.op != ADASUM);
  }
}

// Adasum of two hosts' sums, divided by the ranks of a host (Maleki et al. 2021, section 3.3).
void adasum(const std::string& name, const Group& world, DataType type, const std::vector<int64_t>& sizes) {
  const int half = (int)world.ranks.size() / 2;
  auto expected = [=](size_t t, int64_t i) {
    double sums[2], products[3] = {};
    for (int64_t k = 0; k < sizes[t]; ++k) {
      double a = 0, b = 0;
      for (int r = 0; r < half; ++r) {
        a += value(r, t, k);
        b += value(half + r, t, k);
      }
      products[0] += a * a;
      products[1] += b * b;
      products[2] += a * b;
      if (k == i) {
        sums[0] = a;
        sums[1] = b;
      }
    }
    auto [aa, bb, ab] = products;
    return ((1 - ab / (2 * aa)) * sums[0] + (1 - ab / (2 * bb)) * sums[1]) / half;
  };
  allreduce(name, world, type, sizes, {.op = ADASUM, .grouped = sizes.size() > 1, .expected = expected});
}

// Rank r of the group has rows[r] rows of each tensor.
void allgather(const std::string& name, const Group& on, DataType type, const std::vector<int64_t>& rows,
               const std::vector<int64_t>& columns, bool grouped = false) {
  if (on.me < 0) {
    return;
  }
  Case result(name);
  Requests all{result};
  std::vector<std::shared_ptr<Context>> owners(columns.size(), std::make_shared<Context>(type));
  for (size_t t = 0; t < columns.size(); ++t) {
    if (!grouped) {
      owners[t] = std::make_shared<Context>(type);
    }
    all.add(owners[t], filled(type, {rows[on.me], columns[t]}, t), nullptr);
  }
  if (grouped) {
    result.sent(EnqueueTensorAllgathers(all.contexts, all.tensors, all.events, all.names, device, all.callbacks, on.id),
                (int)columns.size());
  }
  for (size_t t = 0; t < columns.size() && !grouped; ++t) {
    result.sent(EnqueueTensorAllgather(all.contexts[t], all.tensors[t], all.events[t], all.names[t], device,
                                       all.callbacks[t], on.id));
  }
  result.wait();
  for (size_t t = 0; t < columns.size(); ++t) {
    std::vector<double> gathered;
    for (size_t r = 0; r < on.ranks.size(); ++r) {
      for (int64_t i = 0; i < rows[r] * columns[t]; ++i) {
        gathered.push_back(value(on.ranks[r], t, i));
      }
    }
    owners[t]->outputs.resize(columns.size());
    result.check(owners[t]->outputs[grouped ? t : 0], {(int64_t)gathered.size() / columns[t], columns[t]},
                 [&](int64_t i) { return gathered[i]; });
  }
}

void broadcast(const std::string& name, const Group& on, DataType type, int64_t count, int root,
               bool in_place = false) {
  if (on.me < 0) {
    return;
  }
  Case result(name);
  auto input = filled(type, {count}, 0);
  auto output = in_place || on.me == root ? input : made(type, {count}, compute);
  result.sent(EnqueueTensorBroadcast(std::make_shared<Context>(type), input, output, on.ranks[root], result.ready(),
                                     result.unique(), device, result.callback(), on.id));
  result.wait();
  result.check(output, {count}, [&](int64_t i) { return value(on.ranks[root], 0, i); });
}

// Rank r sends (r + peer) % 3 + extra rows to each peer.
void alltoall(const std::string& name, const Group& on, DataType type, int64_t columns, int64_t extra) {
  if (on.me < 0) {
    return;
  }
  Case result(name);
  const int n = (int)on.ranks.size();
  auto rows = [&](int from, int to) { return (from + to) % 3 + extra; };
  auto before = [&](int from, int to) {
    int64_t sum = 0;
    for (int peer = 0; peer < to; ++peer) {
      sum += rows(from, peer);
    }
    return sum;
  };
  auto splits = std::make_shared<Buffer>(HOROVOD_INT32, Shape{n}, true);
  std::vector<double> elements, received;
  for (int peer = 0; peer < n; ++peer) {
    put(HOROVOD_INT32, splits->address, peer, rows(on.me, peer));
    received.push_back(rows(peer, on.me));
    for (int64_t i = 0; i < rows(peer, on.me) * columns; ++i) {
      elements.push_back(value(on.ranks[peer], 0, before(peer, on.me) * columns + i));
    }
  }
  auto context = std::make_shared<Context>(type, true);
  auto input = filled(type, {before(on.me, n), columns}, 0);
  result.sent(EnqueueTensorAlltoall(context, input, splits, result.ready(), result.unique(), device, result.callback(),
                                    on.id));
  result.wait();
  context->outputs.resize(2);
  result.check(context->outputs[0], {(int64_t)elements.size() / columns, columns},
               [&](int64_t i) { return elements[i]; });
  result.check(context->outputs[1], {n}, [&](int64_t i) { return received[i]; });
}

void reducescatter(const std::string& name, const Group& on, DataType type, const std::vector<int64_t>& rows,
                   int64_t columns, const Reduction& how = {}) {
  if (on.me < 0) {
    return;
  }
  Case result(name);
  Requests all{result};
  const int64_t n = on.ranks.size();
  auto share = [&](int64_t whole, int64_t r) { return whole / n + (r < whole % n ? 1 : 0); };
  for (size_t t = 0; t < rows.size(); ++t) {
    all.add(std::make_shared<Context>(type), filled(type, {rows[t], columns}, t),
            made(type, {share(rows[t], on.me), columns}, compute));
  }
  if (how.grouped) {
    result.sent(EnqueueTensorReducescatters(all.contexts, all.tensors, all.outputs, all.events, all.names, device,
                                            all.callbacks, how.op, on.id, how.prescale, how.postscale),
                (int)rows.size());
  }
  for (size_t t = 0; t < rows.size() && !how.grouped; ++t) {
    result.sent(EnqueueTensorReducescatter(all.contexts[t], all.tensors[t], all.outputs[t], all.events[t], all.names[t],
                                           device, all.callbacks[t], how.op, on.id, how.prescale, how.postscale));
  }
  result.wait();
  for (size_t t = 0; t < rows.size(); ++t) {
    int64_t first = 0;
    for (int r = 0; r < on.me; ++r) {
      first += share(rows[t], r) * columns;
    }
    auto expected = [&](int64_t i) {
      double sum = 0;
      for (int r : on.ranks) {
        sum += how.prescale * value(r, t, first + i);
      }
      return sum * how.postscale / (how.op == AVERAGE ? n : 1);
    };
    result.check(all.results[t], {share(rows[t], on.me), columns}, expected, how.op != AVERAGE);
  }
}

// The last rank has no more batches: it joins at once, the others after ``work``.
void join(const std::string& name, const Group& on, const std::function<void(const Group&)>& work) {
  Group rest = on;
  rest.ranks.pop_back();
  if (on.me == (int)rest.ranks.size()) {
    rest.me = -1;
  }
  work(rest);
  Case result(name);
  auto last = std::make_shared<Buffer>(HOROVOD_INT32, Shape{1}, true);
  result.sent(EnqueueJoin(std::make_shared<Context>(HOROVOD_INT32), last, result.ready(), JOIN_TENSOR_NAME, device,
                          result.callback(), on.id));
  result.wait();
  // Which of the others was last is a matter of time.
  const bool only_two = on.ranks.size() == 2;
  result.check(last, {1}, [&](int64_t) { return only_two ? 0 : get(HOROVOD_INT32, last->address, 0); });
}

// Suites ------------------------------------------------------------------------------------------------------------

const auto TYPES = {HOROVOD_UINT8,   HOROVOD_INT8,    HOROVOD_INT32,  HOROVOD_INT64,
                    HOROVOD_FLOAT16, HOROVOD_FLOAT32, HOROVOD_FLOAT64};
const std::vector<int64_t> SEVERAL = {5, 1000, 1, 33}, ONE = {1001};

std::vector<int64_t> uneven(const Group& on, int64_t first) {
  std::vector<int64_t> rows(on.ranks.size());
  std::iota(rows.begin(), rows.end(), first);
  return rows;
}

void reductions(const std::string& prefix, const Group& on) {
  for (auto type : TYPES) {
    auto name = prefix + "allreduce/" + DataType_Name(type);
    allreduce(name, on, type, ONE);
    allreduce(name + "/fused", on, type, SEVERAL, {.grouped = true});
  }
  for (auto type : {HOROVOD_FLOAT16, HOROVOD_FLOAT32, HOROVOD_INT32}) {
    auto name = prefix + "allreduce/" + DataType_Name(type);
    allreduce(name + "/in place", on, type, ONE, {.in_place = true});
    for (bool grouped : {false, true}) {
      auto fused = grouped ? "/fused" : "";
      auto& sizes = grouped ? SEVERAL : ONE;
      allreduce(name + "/average" + fused, on, type, sizes, {.op = AVERAGE, .grouped = grouped});
      allreduce(name + "/min" + fused, on, type, sizes, {.op = MIN, .grouped = grouped});
      allreduce(name + "/max" + fused, on, type, sizes, {.op = MAX, .grouped = grouped});
      allreduce(name + "/product" + fused, on, type, sizes, {.op = PRODUCT, .grouped = grouped});
      allreduce(name + "/scaled" + fused, on, type, sizes, {.prescale = 2, .postscale = 0.5, .grouped = grouped});
      allreduce(name + "/prescaled" + fused, on, type, sizes, {.prescale = 2, .grouped = grouped});
      allreduce(name + "/postscaled" + fused, on, type, sizes, {.postscale = 2, .grouped = grouped});
    }
  }
  allreduce(prefix + "allreduce/large", on, HOROVOD_FLOAT32, {40001});
  allreduce(prefix + "allreduce/large/fused", on, HOROVOD_FLOAT32, {10000, 7}, {.grouped = true});
  allreduce(prefix + "allreduce/200 tensors", on, HOROVOD_FLOAT16, std::vector<int64_t>(200, 3), {.grouped = true});
  allreduce(prefix + "allreduce/as they come", on, HOROVOD_FLOAT64, {9, 40, 1, 700, 33, 8, 8, 8});
}

void others(const std::string& prefix, const Group& on) {
  const int n = (int)on.ranks.size();
  for (auto type : {HOROVOD_UINT8, HOROVOD_INT64, HOROVOD_FLOAT16, HOROVOD_BFLOAT16, HOROVOD_FLOAT32}) {
    auto name = "/" + DataType_Name(type);
    allgather(prefix + "allgather" + name, on, type, std::vector<int64_t>(n, 3), {7});
    allgather(prefix + "allgather" + name + "/uneven", on, type, uneven(on, 1), {7});
    allgather(prefix + "allgather" + name + "/fused", on, type, std::vector<int64_t>(n, 3), {7, 1, 20}, true);
    allgather(prefix + "allgather" + name + "/uneven/fused", on, type, uneven(on, 0), {7, 1, 20}, true);
    for (int root = 0; root < n; ++root) {
      broadcast(prefix + "broadcast" + name + "/root " + std::to_string(root), on, type, 1001, root, root == 1);
    }
    alltoall(prefix + "alltoall" + name, on, type, 5, 1);
    alltoall(prefix + "alltoall" + name + "/some none", on, type, 5, 0);
  }
  allgather(prefix + "allgather/nothing from rank 0", on, HOROVOD_FLOAT32, uneven(on, 0), {7});
  allgather(prefix + "allgather/large", on, HOROVOD_FLOAT64, uneven(on, 100), {211});
  alltoall(prefix + "alltoall/large", on, HOROVOD_FLOAT64, 20011, 1);
  broadcast(prefix + "broadcast/large", on, HOROVOD_FLOAT64, 40001, n - 1);
  for (auto type : {HOROVOD_INT32, HOROVOD_FLOAT16, HOROVOD_FLOAT32, HOROVOD_FLOAT64}) {
    auto name = prefix + "reducescatter/" + DataType_Name(type);
    for (int more = 0; more < n; ++more) {
      auto rows = more ? "/" + std::to_string(more) + " rows more" : "";
      reducescatter(name + rows, on, type, {2 * n + more}, 5);
      reducescatter(name + rows + "/fused", on, type, {2 * n + more, n + more, more}, 5, {.grouped = true});
    }
    reducescatter(name + "/scaled", on, type, {2 * n}, 5, {.prescale = 2, .postscale = 0.5});
    reducescatter(name + "/scaled/fused", on, type, {2 * n, n}, 5, {.prescale = 2, .postscale = 0.5, .grouped = true});
  }
  reducescatter(prefix + "reducescatter/average", on, HOROVOD_FLOAT32, {2 * n + 1}, 5, {.op = AVERAGE});
  // A tensor of a type that NCCL does not have here is refused on all ranks.
  allreduce(prefix + "refused: allreduce/bfloat16", on, HOROVOD_BFLOAT16, ONE);
}

void everything(const Group& world, const std::vector<Group>& sets) {
  reductions("", world);
  others("", world);
  for (auto& set : sets) {
    auto prefix = "set " + std::to_string(set.id) + ": ";
    reductions(prefix, set);
    others(prefix, set);
  }
  join("join/allreduce", world, [](const Group& rest) {
    allreduce("join/allreduce/rest", rest, HOROVOD_FLOAT32, ONE);
    allreduce("join/allreduce/rest/fused", rest, HOROVOD_FLOAT32, SEVERAL, {.grouped = true});
  });
  std::vector<std::thread> threads;
  threads.emplace_back([&] { allreduce("at once/allreduce", world, HOROVOD_FLOAT32, SEVERAL, {.grouped = true}); });
  threads.emplace_back([&] { allgather("at once/allgather", world, HOROVOD_FLOAT32, uneven(world, 1), {7}); });
  threads.emplace_back([&] { broadcast("at once/broadcast", world, HOROVOD_INT64, 1001, 1); });
  threads.emplace_back([&] { alltoall("at once/alltoall", world, HOROVOD_INT64, 5, 1); });
  threads.emplace_back([&] { reducescatter("at once/reducescatter", world, HOROVOD_FLOAT32, {9}, 5); });
  for (auto& thread : threads) {
    thread.join();
  }
}

void one(const std::string& operation, const std::string& name, const Group& on) {
  operation == "allgather"       ? allgather(name, on, HOROVOD_FLOAT32, uneven(on, 1), {7})
  : operation == "broadcast"     ? broadcast(name, on, HOROVOD_FLOAT32, 1001, 1)
  : operation == "alltoall"      ? alltoall(name, on, HOROVOD_FLOAT32, 5, 1)
  : operation == "reducescatter" ? reducescatter(name, on, HOROVOD_FLOAT32, {9}, 5)
                                 : allreduce(name, on, HOROVOD_FLOAT32, SEVERAL, {.grouped = true});
}

Group start(const std::vector<std::vector<int>>& sets = {}) {
  std::vector<int> flat, sizes;
  for (auto& set : sets) {
    flat.insert(flat.end(), set.begin(), set.end());
    sizes.push_back((int)set.size());
  }
  if (!horovod_init(nullptr, 0, flat.data(), sizes.data(), (int)sizes.size())) {
    std::printf("init\t-1\t0\tHorovod did not start\n");
    leave(4);
  }
  rank = horovod_rank();
  device = horovod_local_rank();
  Group world{0, std::vector<int>(horovod_size()), rank};
  std::iota(world.ranks.begin(), world.ranks.end(), 0);
  return world;
}

} // namespace

// harness everything | reductions | adasum | allgather | lost OPERATION | again OPERATION
int main(int, char** arguments) {
  const std::string suite = arguments[1];
  async_completion = std::getenv("HOROVOD_ENABLE_ASYNC_COMPLETION") != nullptr;
  cudaStreamCreateWithPriority(&compute, 0, 0);
  cudaStreamCreateWithPriority(&allocation, 0, 0);
  if (suite == "everything") {
    const int n = std::atoi(std::getenv("HARNESS_SIZE"));
    std::vector<std::vector<int>> lists;
    if (n > 2) {
      lists = {{0, n - 1}, {1}};
    }
    auto world = start(lists);
    std::vector<Group> sets;
    for (size_t i = 0; i < lists.size(); ++i) {
      auto id = (int32_t)i + 1;
      sets.push_back({id, lists[i], horovod_process_set_included(id) == 1 ? horovod_process_set_rank(id) : -1});
    }
    everything(world, sets);
  } else if (suite == "reductions") {
    reductions("", start());
  } else if (suite == "adasum") {
    auto world = start();
    for (auto type : {HOROVOD_FLOAT16, HOROVOD_FLOAT32, HOROVOD_FLOAT64}) {
      auto name = "adasum/" + DataType_Name(type);
      adasum(name, world, type, {256});
      adasum(name + "/odd", world, type, {1001});
      adasum(name + "/fused", world, type, {256, 64, 128});
      adasum(name + "/odd/fused", world, type, {5, 300, 1, 33});
    }
  } else if (suite == "allgather") {
    auto world = start();
    allgather("allgather", world, HOROVOD_FLOAT32, uneven(world, 1), {7});
    allgather("allgather/fused", world, HOROVOD_FLOAT32, std::vector<int64_t>(world.ranks.size(), 3), {7, 1, 20}, true);
  } else {
    // An operation that fails on every rank; with "again" Horovod starts anew and runs it once more.
    one(arguments[2], "fails", suite == "again" ? start() : start({{0, 2}}));
    horovod_shutdown();
    if (suite == "again") {
      one(arguments[2], "runs again", start());
    }
  }
  horovod_shutdown();
  std::printf("end\t0\t0\t\n");
  leave(0);
}
