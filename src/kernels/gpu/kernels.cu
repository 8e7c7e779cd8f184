// The kernels, for NVRTC (kernels.cpp), and on the CPU for the tests (on_host_testing.hpp). Everything is computed in
// fp32, without fused multiply-adds, so that AdamW gives the bits of kernels/flat.hpp. Sixteen bytes are read
// at once where all pointers are aligned, single elements elsewhere.

namespace isograd::gpu {

using Index = long long;

struct Bf16 {
  unsigned short bits;
};

template <typename T>
struct alignas(16) Pack {
  static constexpr int kCount = 16 / sizeof(T);
  T at[kCount];
};

// Four elements of whatever type.
template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T at[4];
};

__device__ inline float widen(float x) {
  return x;
}
__device__ inline float widen(Bf16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}

// To nearest even.
__device__ inline void round_to(float x, float& y) {
  y = x;
}
__device__ inline void round_to(float x, Bf16& y) {
#ifdef __CUDA_ARCH__
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
  const unsigned bits = __float_as_uint(x);
  y.bits = static_cast<unsigned short>(
      (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
}

template <typename P>
__device__ inline const P& pack(const void* values, Index i) {
  return static_cast<const P*>(values)[i];
}
template <typename P>
__device__ inline P& pack(void* values, Index i) {
  return static_cast<P*>(values)[i];
}

__device__ inline bool aligned(const void* values, unsigned bytes) {
  return reinterpret_cast<unsigned long long>(values) % bytes == 0;
}

__device__ inline Index thread_index() {
  return static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ inline Index thread_count() {
  return static_cast<Index>(gridDim.x) * blockDim.x;
}

// 1/(1 + e^−x) through e^−|x|, which cannot overflow.
__device__ inline float logistic(float x) {
  const float e = expf(-fabsf(x));
  return (x < 0 ? e : 1.0f) / (1.0f + e);
}

// y = silu(gate) ∘ up
template <typename T>
__device__ inline void swiglu_one(T gate, T up, T& y) {
  const float x = widen(gate);
  round_to(x * logistic(x) * widen(up), y);
}

template <typename T>
__device__ inline void swiglu(const T* gate, const T* up, T* y, Index count) {
  using P = Pack<T>;
  const bool by_packs = aligned(gate, 16) && aligned(up, 16) && aligned(y, 16);
  const Index packs = by_packs ? count / P::kCount : 0;
  for (Index i = thread_index(); i < packs; i += thread_count()) {
    const P g = pack<P>(gate, i), u = pack<P>(up, i);
    P result;
#pragma unroll
    for (int k = 0; k < P::kCount; ++k) swiglu_one(g.at[k], u.at[k], result.at[k]);
    pack<P>(y, i) = result;
  }
  for (Index i = packs * P::kCount + thread_index(); i < count; i += thread_count())
    swiglu_one(gate[i], up[i], y[i]);
}

template <typename T>
__device__ inline void swiglu_backward_one(T dy, T gate, T up, T& dgate, T& dup) {
  const float g = widen(dy), x = widen(gate), s = logistic(x);
  round_to(g * widen(up) * (s * (1.0f + x * (1.0f - s))), dgate);
  round_to(g * (x * s), dup);
}

template <typename T>
__device__ inline void swiglu_backward(const T* dy, const T* gate, const T* up, T* dgate, T* dup,
                                       Index count) {
  using P = Pack<T>;
  const bool by_packs =
      aligned(dy, 16) && aligned(gate, 16) && aligned(up, 16) && aligned(dgate, 16) && aligned(dup, 16);
  const Index packs = by_packs ? count / P::kCount : 0;
  for (Index i = thread_index(); i < packs; i += thread_count()) {
    const P d = pack<P>(dy, i), g = pack<P>(gate, i), u = pack<P>(up, i);
    P first, second;
#pragma unroll
    for (int k = 0; k < P::kCount; ++k)
      swiglu_backward_one(d.at[k], g.at[k], u.at[k], first.at[k], second.at[k]);
    pack<P>(dgate, i) = first;
    pack<P>(dup, i) = second;
  }
  for (Index i = packs * P::kCount + thread_index(); i < count; i += thread_count())
    swiglu_backward_one(dy[i], gate[i], up[i], dgate[i], dup[i]);
}

// Pairs (i, i + half) of each head turned by the angle of their row; backwards with direction −1. A block has
// a row. x [rows, heads, 2 half] with rows `stride` apart, y dense, cos and sin [rows, half].
template <typename T>
__device__ inline void rotary(const T* x, Index stride, const float* cos, const float* sin, T* y, int heads,
                              int half, float direction) {
  using P = Pack<T>;
  const Index row = blockIdx.x;
  x += row * stride;
  y += row * heads * 2 * half;
  cos += row * half;
  sin += row * half;
  const bool by_packs =
      half % P::kCount == 0 && aligned(x, 16) && aligned(y, 16) && aligned(cos, 16) && aligned(sin, 16);
  if (by_packs) {
    const int packs = half / P::kCount;  // of half a head
    for (int i = threadIdx.x; i < heads * packs; i += blockDim.x) {
      const int head = i / packs, within = i % packs;
      const Index low = static_cast<Index>(head) * 2 * packs + within, high = low + packs;
      const P a = pack<P>(x, low), b = pack<P>(x, high);
      P first, second;
#pragma unroll
      for (int f = 0; f < P::kCount / 4; ++f) {
        const Four<float> c = pack<Four<float>>(cos, within * (P::kCount / 4) + f),
                          s = pack<Four<float>>(sin, within * (P::kCount / 4) + f);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int k = 4 * f + j;
          const float p = widen(a.at[k]), q = widen(b.at[k]), turn = direction * s.at[j];
          round_to(p * c.at[j] - q * turn, first.at[k]);
          round_to(q * c.at[j] + p * turn, second.at[k]);
        }
      }
      pack<P>(y, low) = first;
      pack<P>(y, high) = second;
    }
    return;
  }
  for (int i = threadIdx.x; i < heads * half; i += blockDim.x) {
    const int head = i / half, within = i % half;
    const Index low = static_cast<Index>(head) * 2 * half + within, high = low + half;
    const float p = widen(x[low]), q = widen(x[high]), turn = direction * sin[within];
    round_to(p * cos[within] - q * turn, y[low]);
    round_to(q * cos[within] + p * turn, y[high]);
  }
}

// The sum over a block, in one order, for all of its threads.
__device__ inline float block_sum(float x) {
  __shared__ float parts[kNormThreads / 32];
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
  __syncthreads();  // others may still read the last sum
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += parts[warp];
  return sum;
}

template <typename T>
__device__ inline Pack<T> read(const T* values, Index i, bool by_packs) {
  using P = Pack<T>;
  if (by_packs) return pack<P>(values, i);
  P result;
#pragma unroll
  for (int k = 0; k < P::kCount; ++k) result.at[k] = values[i * P::kCount + k];
  return result;
}
template <typename T>
__device__ inline void write(T* values, Index i, bool by_packs, const Pack<T>& from) {
  using P = Pack<T>;
  if (by_packs) {
    pack<P>(values, i) = from;
    return;
  }
#pragma unroll
  for (int k = 0; k < P::kCount; ++k) values[i * P::kCount + k] = from.at[k];
}

// y = weight ∘ x scale, scale = 1/√(mean x² + ε). A block has a row of `packs` packs, at most kNormPacks for
// a thread.
template <typename T>
__device__ inline void rms_norm(const T* x, const T* weight, T* y, float* scales, int packs, float epsilon) {
  using P = Pack<T>;
  const Index row = blockIdx.x, width = static_cast<Index>(packs) * P::kCount;
  x += row * width;
  y += row * width;
  const bool by_packs = aligned(x, 16) && aligned(weight, 16) && aligned(y, 16);
  P own[kNormPacks];
  float squares = 0;
#pragma unroll
  for (int n = 0; n < kNormPacks; ++n) {
    const int i = static_cast<int>(threadIdx.x + n * blockDim.x);
    if (i >= packs) continue;
    own[n] = read(x, i, by_packs);
#pragma unroll
    for (int k = 0; k < P::kCount; ++k) squares += widen(own[n].at[k]) * widen(own[n].at[k]);
  }
  const float scale = 1.0f / sqrtf(block_sum(squares) / static_cast<float>(width) + epsilon);
  if (threadIdx.x == 0) scales[row] = scale;
#pragma unroll
  for (int n = 0; n < kNormPacks; ++n) {
    const int i = static_cast<int>(threadIdx.x + n * blockDim.x);
    if (i >= packs) continue;
    const P w = read(weight, i, by_packs);
    P result;
#pragma unroll
    for (int k = 0; k < P::kCount; ++k)
      round_to(widen(w.at[k]) * (widen(own[n].at[k]) * scale), result.at[k]);
    write(y, i, by_packs, result);
  }
}

// dx = scale (w ∘ dy − x scale² mean(w ∘ dy ∘ x)) + residual, which may be null. A block has `each` rows; the
// weight's gradient is summed over them into row `block` of `sums` [blocks, width], which may be null.
template <typename T>
__device__ inline void rms_norm_backward(const T* dy, const T* x, const T* weight, const float* scales,
                                         const T* residual, T* dx, float* sums, Index rows, Index each,
                                         int packs) {
  using P = Pack<T>;
  const Index width = static_cast<Index>(packs) * P::kCount, begin = blockIdx.x * each,
              end = begin + each < rows ? begin + each : rows;
  const bool by_packs =
      aligned(dy, 16) && aligned(x, 16) && aligned(weight, 16) && aligned(dx, 16) && aligned(residual, 16);
  float own[kNormPacks][P::kCount] = {};
  for (Index row = begin; row < end; ++row) {
    const T *dy_row = dy + row * width, *x_row = x + row * width;
    const float scale = scales[row];
    P g[kNormPacks], v[kNormPacks], other[kNormPacks];
    float products = 0;
#pragma unroll
    for (int n = 0; n < kNormPacks; ++n) {
      const int i = static_cast<int>(threadIdx.x + n * blockDim.x);
      if (i >= packs) continue;
      g[n] = read(dy_row, i, by_packs);
      v[n] = read(x_row, i, by_packs);
      if (residual) other[n] = read(residual + row * width, i, by_packs);
      const P w = read(weight, i, by_packs);
#pragma unroll
      for (int k = 0; k < P::kCount; ++k) {
        const float both = widen(g[n].at[k]) * widen(v[n].at[k]);
        products += widen(w.at[k]) * both;
        own[n][k] += both * scale;
      }
    }
    const float along = scale * scale * block_sum(products) / static_cast<float>(width);
#pragma unroll
    for (int n = 0; n < kNormPacks; ++n) {
      const int i = static_cast<int>(threadIdx.x + n * blockDim.x);
      if (i >= packs) continue;
      const P w = read(weight, i, by_packs);
      P result;
#pragma unroll
      for (int k = 0; k < P::kCount; ++k) {
        const float norms = scale * (widen(w.at[k]) * widen(g[n].at[k]) - widen(v[n].at[k]) * along);
        round_to(residual ? norms + widen(other[n].at[k]) : norms, result.at[k]);
      }
      write(dx + row * width, i, by_packs, result);
    }
  }
  if (!sums) return;
  sums += blockIdx.x * width;
#pragma unroll
  for (int n = 0; n < kNormPacks; ++n) {
    const int i = static_cast<int>(threadIdx.x + n * blockDim.x);
    if (i >= packs) continue;
#pragma unroll
    for (int f = 0; f < P::kCount / 4; ++f) {
      Four<float> four;
#pragma unroll
      for (int j = 0; j < 4; ++j) four.at[j] = own[n][4 * f + j];
      pack<Four<float>>(sums, static_cast<Index>(i) * (P::kCount / 4) + f) = four;
    }
  }
}

// One update (kernels::AdamW). `rounded` may be null.
template <typename G>
__device__ inline void adamw_one(const AdamWScalars& with, float keep, G g, float& p, float& first,
                                 float& second) {
  const float gradient = with.scale * widen(g);
  const float m = first + with.new1 * (gradient - first);
  const float v = with.beta2 * second + with.new2 * gradient * gradient;
  p = keep * p - with.step * m / (sqrtf(v) * with.correction + with.epsilon);
  first = m;
  second = v;
}

template <typename G>
__device__ inline void adamw_at(const AdamWScalars& with, float keep, const G* gradients, float* master,
                                float* first, float* second, Bf16* rounded, Index i) {
  adamw_one(with, keep, gradients[i], master[i], first[i], second[i]);
  if (rounded) round_to(master[i], rounded[i]);
}

// `scale`, not null, takes the place of the scalars'; nothing moves where `stop`, not null, is not 0.
template <typename G>
__device__ inline void adamw(const AdamWScalars& scalars, const Runs& runs, const G* gradients, float* master,
                             float* first, float* second, Bf16* rounded, const double* scale,
                             const float* stop) {
  if (stop && *stop != 0) return;
  AdamWScalars with = scalars;
  if (scale) with.scale = static_cast<float>(*scale);
  const Index chunk_begin = runs.begin + static_cast<Index>(blockIdx.x) * kAdamWChunk;
  const Index all_end = runs.end[runs.count - 1];
  const Index chunk_end = chunk_begin + kAdamWChunk < all_end ? chunk_begin + kAdamWChunk : all_end;
  // The first run that ends after the chunk's begin.
  int run = 0;
  for (int after = runs.count; run < after;) {
    const int middle = (run + after) / 2;
    if (runs.end[middle] > chunk_begin)
      after = middle;
    else
      run = middle + 1;
  }
  const bool by_fours = aligned(gradients, 4 * sizeof(G)) && aligned(master, 16) && aligned(first, 16) &&
                        aligned(second, 16) && aligned(rounded, 8);
  for (Index begin = chunk_begin; begin < chunk_end; ++run) {
    const Index end = runs.end[run] < chunk_end ? runs.end[run] : chunk_end;
    const float keep = runs.decays[run / 32] >> (run % 32) & 1u ? with.keep : 1.0f;
    // Single elements up to fours_begin and from fours_end on.
    Index fours_begin = (begin + 3) / 4 * 4, fours_end = end / 4 * 4;
    if (!by_fours || fours_begin >= fours_end) fours_begin = fours_end = end;
    for (Index i = begin + threadIdx.x; i < fours_begin; i += blockDim.x)
      adamw_at(with, keep, gradients, master, first, second, rounded, i);
    for (Index f = fours_begin / 4 + threadIdx.x; f < fours_end / 4; f += blockDim.x) {
      const Four<G> g = pack<Four<G>>(gradients, f);
      Four<float> p = pack<Four<float>>(master, f), m = pack<Four<float>>(first, f),
                  v = pack<Four<float>>(second, f);
      Four<Bf16> low;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        adamw_one(with, keep, g.at[k], p.at[k], m.at[k], v.at[k]);
        round_to(p.at[k], low.at[k]);
      }
      pack<Four<float>>(master, f) = p;
      pack<Four<float>>(first, f) = m;
      pack<Four<float>>(second, f) = v;
      if (rounded) pack<Four<Bf16>>(rounded, f) = low;
    }
    for (Index i = fours_end + threadIdx.x; i < end; i += blockDim.x)
      adamw_at(with, keep, gradients, master, first, second, rounded, i);
    begin = end;
  }
}

#define ISOGRAD_FOR_TYPE(T, name)                                                                           \
  extern "C" __global__ void __launch_bounds__(256)                                                         \
      isograd_swiglu_##name(const T* gate, const T* up, T* y, Index count) {                                \
    swiglu(gate, up, y, count);                                                                             \
  }                                                                                                         \
  extern "C" __global__ void __launch_bounds__(256) isograd_swiglu_backward_##name(                         \
      const T* dy, const T* gate, const T* up, T* dgate, T* dup, Index count) {                             \
    swiglu_backward(dy, gate, up, dgate, dup, count);                                                       \
  }                                                                                                         \
  extern "C" __global__ void __launch_bounds__(256)                                                         \
      isograd_rotary_##name(const T* x, Index stride, const float* cos, const float* sin, T* y, int heads,  \
                            int half, float direction) {                                                    \
    rotary(x, stride, cos, sin, y, heads, half, direction);                                                 \
  }                                                                                                         \
  extern "C" __global__ void __launch_bounds__(kNormThreads)                                                \
      isograd_rms_norm_##name(const T* x, const T* weight, T* y, float* scales, int packs, float epsilon) { \
    rms_norm(x, weight, y, scales, packs, epsilon);                                                         \
  }                                                                                                         \
  extern "C" __global__ void __launch_bounds__(kNormThreads) isograd_rms_norm_backward_##name(              \
      const T* dy, const T* x, const T* weight, const float* scales, const T* residual, T* dx, float* sums, \
      Index rows, Index each, int packs) {                                                                  \
    rms_norm_backward(dy, x, weight, scales, residual, dx, sums, rows, each, packs);                        \
  }                                                                                                         \
  extern "C" __global__ void __launch_bounds__(256) isograd_adamw_##name(                                   \
      const __grid_constant__ AdamWScalars with, const __grid_constant__ Runs runs, const T* gradients,     \
      float* master, float* first, float* second, Bf16* rounded, const double* scale, const float* stop) {  \
    adamw(with, runs, gradients, master, first, second, rounded, scale, stop);                              \
  }
ISOGRAD_FOR_TYPE(float, float)
ISOGRAD_FOR_TYPE(Bf16, bfloat16)
#undef ISOGRAD_FOR_TYPE

}  // namespace isograd::gpu
