// A stand-in for CUDA's runtime and NCCL on a machine without a card; README.md beside this file says what it shows.
#ifndef STANDIN_H
#define STANDIN_H

#include <cuda_runtime.h>

#include <cstddef>
#include <functional>
#include <type_traits>

namespace standin {

// Where the bytes of a device address lie. Any other address is returned as it is. The host's own reads and writes
// at a device address end in a segmentation fault, as on a GPU.
void* bytes(const void* address);
// Whether an address is the device's.
bool on_device(const void* address);
// Appends work to a stream.
void submit(cudaStream_t stream, std::function<void()> work);
// How many allocations were written past their end.
int overruns();

template <typename T> T with_bytes(T value) {
  if constexpr (std::is_pointer_v<T>) {
    return (T)bytes((const void*)value);
  } else if constexpr (requires { value.in; value.out; }) {
    for (auto& address : value.in) {
      address = bytes(address);
    }
    for (auto& address : value.out) {
      address = bytes(address);
    }
  }
  return value;
}

} // namespace standin

// A kernel is called once a thread, in order, on its stream's thread.
inline thread_local dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace standin {

template <typename Kernel, typename... Arguments>
void launch(unsigned blocks, unsigned threads, int, cudaStream_t stream, Kernel kernel, Arguments... arguments) {
  submit(stream, [=, ... values = with_bytes(arguments)] {
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
      for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {
        kernel(values...);
      }
    }
  });
}

} // namespace standin

#endif
