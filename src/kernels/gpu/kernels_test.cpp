// kernels.cu as C++, against fp64.
#include "kernels/gpu/kernels.hpp"

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>

#include "kernels/gpu/kept.hpp"
#include "kernels/gpu/on_host_testing.hpp"
// Its unrolling pragmas are for NVRTC.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunknown-pragmas"
#include "kernels/gpu/kernels.cu"
#pragma GCC diagnostic pop
#include "kernels/flat.hpp"

namespace isograd::gpu {
namespace {

constexpr std::int64_t kGuard = 16;  // elements around an array that nobody may write to

template <typename T>
T rounded(float x) {
  T result;
  round_to(x, result);
  return result;
}

// `count` elements that begin `shift` elements after an aligned address.
template <typename T>
class Array {
 public:
  Array(std::int64_t count, std::int64_t shift, unsigned seed, double scale = 1, bool positive = false)
      : count_(count), memory_(static_cast<std::size_t>(count + shift + 2 * kGuard + 16)) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data() + kGuard);
    begin_ = kGuard + static_cast<std::int64_t>((64 - address % 64) % 64 / sizeof(T)) % 16 + shift;
    std::mt19937 random(seed);
    std::normal_distribution<double> normal(0, scale);
    for (T& x : memory_)
      x = rounded<T>(static_cast<float>(positive ? std::abs(normal(random)) : normal(random)));
    before_ = memory_;
  }
  T* data() { return memory_.data() + begin_; }
  double operator[](std::int64_t i) const { return widen(memory_[static_cast<std::size_t>(begin_ + i)]); }
  bool guards_hold() const {
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      const auto at = static_cast<std::int64_t>(i) - begin_;
      if ((at < 0 || at >= count_) && widen(memory_[i]) != widen(before_[i])) return false;
    }
    return true;
  }

 private:
  std::int64_t count_, begin_ = 0;
  std::vector<T> memory_, before_;
};

// For results that fp32 computes in a few operations and T rounds once.
template <typename T>
double tolerance(double magnitude) {
  const double unit = std::is_same_v<T, Bf16> ? std::ldexp(1., -8) : 0;
  return (unit + 16 * std::ldexp(1., -24)) * magnitude + 1e-37;
}

constexpr std::int64_t kShifts[] = {0, 1, 2, 4, 8};

template <typename T, typename Kernel, typename BackwardKernel>
double worst_swiglu(Kernel kernel, BackwardKernel backward, bool fault = false) {
  double worst = 0;
  for (const std::int64_t count : {1, 7, 8, 31, 64, 1000, 5003})
    for (const std::int64_t shift : kShifts) {
      Array<T> gate(count, shift, 1, 20), up(count, shift, 2), dy(count, shift, 3), y(count, shift, 4),
          dgate(count, shift, 5), dup(count, 0, 6);
      run_on_host(kernel, 2, 64, gate.data(), up.data(), y.data(), static_cast<Index>(count - fault));
      run_on_host(backward, 3, 32, dy.data(), gate.data(), up.data(), dgate.data(), dup.data(),
                  static_cast<Index>(count));
      EXPECT_TRUE(gate.guards_hold() && up.guards_hold() && dy.guards_hold() && y.guards_hold() &&
                  dgate.guards_hold() && dup.guards_hold());
      for (std::int64_t i = 0; i < count; ++i) {
        const double x = gate[i], s = 1 / (1 + std::exp(-x));
        const auto note = [&](double found, double expected, double magnitude) {
          worst = std::max(worst, std::abs(found - expected) / tolerance<T>(magnitude));
        };
        const double slope = s * (1 + x * (1 - s));
        note(y[i], x * s * up[i], std::abs(x * s * up[i]));
        note(dup[i], dy[i] * x * s, std::abs(dy[i] * x * s));
        note(dgate[i], dy[i] * up[i] * slope, std::abs(dy[i] * up[i]) * s * (1 + std::abs(x)));
      }
    }
  return worst;
}

TEST(GpuKernels, SwiGlu) {
  EXPECT_LT((worst_swiglu<float>(isograd_swiglu_float, isograd_swiglu_backward_float)), 1);
  EXPECT_LT((worst_swiglu<Bf16>(isograd_swiglu_bfloat16, isograd_swiglu_backward_bfloat16)), 1);
  EXPECT_GT((worst_swiglu<Bf16>(isograd_swiglu_bfloat16, isograd_swiglu_backward_bfloat16, true)), 10);
}

template <typename T, typename Kernel>
double worst_rotary(Kernel kernel, float direction, float said) {
  double worst = 0;
  for (const auto& [rows, heads, half] :
       {std::array{1, 1, 1}, {3, 2, 4}, {5, 3, 8}, {2, 5, 24}, {4, 33, 64}, {3, 2, 13}})
    for (const std::int64_t shift : kShifts)
      for (const std::int64_t gap : {0, 8, 3}) {
        const std::int64_t dense = 2LL * heads * half, stride = dense + gap;
        Array<T> x(rows * stride, shift, 1), y(rows * dense, shift % 2, 2);
        Array<float> cos(rows * half, 0, 3), sin(rows * half, shift % 3, 4);
        run_on_host(kernel, static_cast<unsigned>(rows), rotary_threads(heads, half), x.data(),
                    static_cast<Index>(stride), cos.data(), sin.data(), y.data(), heads, half, said);
        EXPECT_TRUE(x.guards_hold() && y.guards_hold() && cos.guards_hold() && sin.guards_hold());
        for (std::int64_t r = 0; r < rows; ++r)
          for (std::int64_t h = 0; h < heads; ++h)
            for (std::int64_t i = 0; i < half; ++i) {
              const double a = x[r * stride + h * 2 * half + i], b = x[r * stride + h * 2 * half + half + i],
                           c = cos[r * half + i], s = direction * sin[r * half + i];
              const double magnitude = std::abs(a * c) + std::abs(b * s) + std::abs(b * c) + std::abs(a * s);
              const std::int64_t at = r * dense + h * 2 * half + i;
              worst = std::max({worst, std::abs(y[at] - (a * c - b * s)) / tolerance<T>(magnitude),
                                std::abs(y[at + half] - (b * c + a * s)) / tolerance<T>(magnitude)});
            }
      }
  return worst;
}

TEST(GpuKernels, Rotary) {
  for (const float direction : {1.f, -1.f}) {
    EXPECT_LT((worst_rotary<float>(isograd_rotary_float, direction, direction)), 1);
    EXPECT_LT((worst_rotary<Bf16>(isograd_rotary_bfloat16, direction, direction)), 1);
    EXPECT_GT((worst_rotary<Bf16>(isograd_rotary_bfloat16, direction, -direction)), 10);
  }
  EXPECT_EQ(rotary_threads(1, 1), 32);
  EXPECT_EQ(rotary_threads(8, 64), 64);
  EXPECT_EQ(rotary_threads(100, 128), 256);
}

// Rows of `packs` packs, normalized by blocks of `threads` threads; `each` rows of the backward to a block.
template <typename T, typename Kernel, typename BackwardKernel>
double worst_norm(Kernel kernel, BackwardKernel backward, bool fault = false) {
  double worst = 0;
  constexpr double kEpsilon = 1e-5;
  constexpr std::int64_t kCount = Pack<T>::kCount;
  for (const auto& [packs, threads, rows, each] :
       {std::array{32, 32, 3, 1}, {41, 64, 5, 2}, {64, 32, 4, 3}, {1, 32, 2, 2}, {70, 96, 2, 1}})
    for (const std::int64_t shift : {0, 1})
      for (const bool onto : {false, true}) {
        const std::int64_t width = packs * kCount, blocks = (rows + each - 1) / each, all = rows * width;
        Array<T> x(all, shift, 1, 3), weight(width, 0, 2), dy(all, 0, 3), residual(all, shift, 4),
            y(all, shift, 5), dx(all, 0, 6);
        Array<float> scales(rows, 0, 7), sums(blocks * width, 0, 8);
        run_together_on_host(kernel, static_cast<unsigned>(rows), static_cast<unsigned>(threads), x.data(),
                             weight.data(), y.data(), scales.data(), packs, static_cast<float>(kEpsilon));
        run_together_on_host(backward, static_cast<unsigned>(blocks), static_cast<unsigned>(threads),
                             dy.data(), x.data(), weight.data(), scales.data(),
                             onto != fault ? residual.data() : nullptr, dx.data(), sums.data(),
                             static_cast<Index>(rows), static_cast<Index>(each), packs);
        EXPECT_TRUE(x.guards_hold() && weight.guards_hold() && dy.guards_hold() && residual.guards_hold() &&
                    y.guards_hold() && dx.guards_hold() && scales.guards_hold() && sums.guards_hold());
        const auto note = [&](double found, double expected, double allowed) {
          worst = std::max(worst, std::abs(found - expected) / allowed);
        };
        std::vector<double> of_weight(static_cast<std::size_t>(width)), magnitudes(of_weight.size());
        for (std::int64_t r = 0; r < rows; ++r) {
          double squares = 0, along = 0, most = 0;
          for (std::int64_t i = 0; i < width; ++i) {
            const double v = x[r * width + i], product = weight[i] * dy[r * width + i] * v;
            squares += v * v, along += product, most += std::abs(product);
          }
          const double mean = static_cast<double>(width), s = 1 / std::sqrt(squares / mean + kEpsilon);
          along *= s * s / mean, most *= s * s / mean;
          for (std::int64_t i = 0; i < width; ++i) {
            const std::int64_t at = r * width + i;
            const double v = x[at], w = weight[i], g = dy[at], other = onto ? residual[at] : 0;
            note(y[at], w * v * s, tolerance<T>(std::abs(w * v * s)));
            note(dx[at], s * (w * g - v * along) + other,
                 tolerance<T>(s * (std::abs(w * g) + std::abs(v) * most) + std::abs(other)));
            of_weight[static_cast<std::size_t>(i)] += g * v * s;
            magnitudes[static_cast<std::size_t>(i)] += std::abs(g * v * s);
          }
        }
        for (std::int64_t i = 0; i < width; ++i) {
          double found = 0;
          for (std::int64_t b = 0; b < blocks; ++b) found += sums[b * width + i];
          note(found, of_weight[static_cast<std::size_t>(i)],
               tolerance<float>(magnitudes[static_cast<std::size_t>(i)]));
        }
      }
  return worst;
}

TEST(GpuKernels, RmsNorm) {
  EXPECT_LT((worst_norm<float>(isograd_rms_norm_float, isograd_rms_norm_backward_float)), 1);
  EXPECT_LT((worst_norm<Bf16>(isograd_rms_norm_bfloat16, isograd_rms_norm_backward_bfloat16)), 1);
  EXPECT_GT((worst_norm<Bf16>(isograd_rms_norm_bfloat16, isograd_rms_norm_backward_bfloat16, true)), 10);
  EXPECT_EQ(norm_threads(32), 32);
  EXPECT_EQ(norm_threads(33), 64);
  EXPECT_EQ(norm_threads(512), 256);
  EXPECT_EQ(norm_threads(513), 512);
  EXPECT_EQ(norm_threads(1024), 512);
  EXPECT_EQ(norm_rows(1), 1);
  EXPECT_EQ(norm_rows(512), 1);
  EXPECT_EQ(norm_rows(8192), 16);
}

// `begin` and the ends of runs, the first of which decays, then every other one: elements whose bits are not
// those of kernels::adamw.
template <typename G, typename Theirs, typename Kernel>
std::int64_t adamw_differences(Kernel kernel, std::int64_t begin, const std::vector<std::int64_t>& lengths,
                               std::int64_t shift, bool rounds, bool fault = false, bool on_device = false) {
  std::vector<RunEnd> ends;
  std::int64_t count = begin;
  for (const std::int64_t length : lengths) ends.push_back({count += length, ends.size() % 2 == 0});
  Array<G> gradients(count, shift, 1);
  Array<float> master(count, 0, 2), first(count, shift % 2, 3), second(count, 0, 4, 1, true);
  Array<float> master2(count, 0, 2), first2(count, 0, 3), second2(count, 0, 4, 1, true);
  Array<Bf16> low(count, shift, 5), low2(count, 0, 5);
  const auto refill = [count](Array<float>& to, const Array<float>& from) {
    for (std::int64_t i = 0; i < count; ++i) to.data()[i] = static_cast<float>(from[i]);
  };
  refill(master2, master), refill(first2, first), refill(second2, second);
  for (std::int64_t i = 0; i < count; ++i) low2.data()[i] = low.data()[i];
  kernels::AdamW with{.gradient_scale = 0.7, .keep = 0.9, .step_size = 0.01, .inverse_root_correction = 1.3};
  const double scale = with.gradient_scale;
  const float goes = 0;
  const AdamWScalars scalars{.scale = on_device ? 3 : static_cast<float>(with.gradient_scale),
                             .keep = static_cast<float>(fault ? 0.91 : with.keep),
                             .beta2 = static_cast<float>(with.beta2),
                             .new1 = static_cast<float>(1 - with.beta1),
                             .new2 = static_cast<float>(1 - with.beta2),
                             .step = static_cast<float>(with.step_size),
                             .correction = static_cast<float>(with.inverse_root_correction),
                             .epsilon = static_cast<float>(with.epsilon)};
  for (const Runs& runs : tables_of(begin, ends))
    run_on_host(kernel, adamw_blocks(runs), 64u, scalars, runs, gradients.data(), master.data(), first.data(),
                second.data(), rounds ? low.data() : nullptr, on_device ? &scale : nullptr,
                on_device ? &goes : nullptr);
  EXPECT_TRUE(gradients.guards_hold() && master.guards_hold() && first.guards_hold() &&
              second.guards_hold() && low.guards_hold());
  std::int64_t at = begin;
  for (const RunEnd& run : ends) {
    kernels::AdamW own = with;
    if (!run.decays) own.keep = 1;
    const auto* g = reinterpret_cast<const Theirs*>(gradients.data()) + at;
    auto* r = reinterpret_cast<kernels::Bfloat16*>(low2.data()) + at;
    kernels::adamw(own, g, master2.data() + at, first2.data() + at, second2.data() + at, rounds ? r : nullptr,
                   run.end - at);
    at = run.end;
  }
  std::int64_t differences = 0;
  for (std::int64_t i = 0; i < count; ++i)
    differences +=
        master[i] != master2[i] || first[i] != first2[i] || second[i] != second2[i] || low[i] != low2[i];
  return differences;
}

TEST(GpuKernels, AdamW) {
  const std::vector<std::vector<std::int64_t>> all = {{1},
                                                      {3},
                                                      {4},
                                                      {0, 5},
                                                      {17, 2, 1, 8},
                                                      {kAdamWChunk},
                                                      {kAdamWChunk + 1, 7},
                                                      {5, 3 * kAdamWChunk, 11, 4096, 3},
                                                      std::vector<std::int64_t>(2 * Runs::kMost + 3, 9)};
  for (const auto& lengths : all)
    for (const std::int64_t begin : {0, 4, 7})
      for (const std::int64_t shift : kShifts)
        for (const bool rounds : {false, true}) {
          for (const bool on_device : {false, true})
            EXPECT_EQ((adamw_differences<float, float>(isograd_adamw_float, begin, lengths, shift, rounds,
                                                       false, on_device)),
                      0);
          EXPECT_EQ((adamw_differences<Bf16, kernels::Bfloat16>(isograd_adamw_bfloat16, begin, lengths, shift,
                                                                rounds)),
                    0);
        }
  EXPECT_EQ((adamw_differences<float, float>(isograd_adamw_float, 3, {10, 20, 30}, 0, false, true)), 40);
}

TEST(GpuKernels, AdamWIsStoppedByTheDevice) {
  Array<float> gradients(50, 0, 1), master(50, 0, 2), first(50, 0, 3), second(50, 0, 4, 1, true);
  Array<Bf16> low(50, 0, 5);
  const Runs runs = tables_of(0, {{20, true}, {50, false}}).front();
  const auto sum = [&] {
    double all = 0;
    for (std::int64_t i = 0; i < 50; ++i) all += master[i] + 3 * first[i] + 7 * second[i] + 11 * low[i];
    return all;
  };
  const double scale = 1, before = sum();
  for (const float stop : {1.f, std::nanf(""), 0.f}) {
    run_on_host(isograd_adamw_float, 1, 32,
                AdamWScalars{.scale = 1,
                             .keep = 0.9f,
                             .beta2 = 0.9f,
                             .new1 = 0.1f,
                             .new2 = 0.1f,
                             .step = 0.1f,
                             .correction = 1,
                             .epsilon = 1e-8f},
                runs, gradients.data(), master.data(), first.data(), second.data(), low.data(), &scale,
                &stop);
    EXPECT_EQ(sum() == before, stop != 0) << stop;
  }
}

class KeptKernels : public ::testing::Test {
 protected:
  KeptKernels() : root_(std::filesystem::path(::testing::TempDir()) / fmt::format("kept-{}", getpid())) {
    std::filesystem::remove_all(root_);
    std::filesystem::create_directories(root_);
  }
  ~KeptKernels() override { std::filesystem::remove_all(root_); }
  std::string get(const std::filesystem::path& folder, const std::string& key,
                  const std::string& code = "code") {
    return kept(folder, key, [&] {
      ++made_;
      return code;
    });
  }
  std::filesystem::path root_;
  int made_ = 0;
};

TEST_F(KeptKernels, AreMadeOnceForEachKey) {
  EXPECT_EQ(get(root_ / "a/b", "source sm_90", "first"), "first");
  EXPECT_EQ(get(root_ / "a/b", "source sm_90", "second"), "first");
  EXPECT_EQ(get(root_ / "a/b", "source sm_80", "third"), "third");
  EXPECT_EQ(made_, 2);
  EXPECT_EQ(get({}, "source sm_90", "nowhere"), "nowhere");
}

TEST_F(KeptKernels, AreMadeAnewWhereTheFileIsNotWhole) {
  const std::string code(1000, 'x');
  get(root_, "key", code);
  const auto path = std::filesystem::directory_iterator(root_)->path();
  for (const std::uintmax_t bytes : {500, 16, 3, 0}) {
    std::filesystem::resize_file(path, bytes);
    EXPECT_EQ(get(root_, "key", code), code);
  }
  write_file(path, read_file(path).replace(700, 1, "y"));
  EXPECT_EQ(get(root_, "key", code), code);
  EXPECT_EQ(made_, 6);
  EXPECT_EQ(get(root_, "key", "other"), code);
}

TEST_F(KeptKernels, AreMadeEachTimeWhereNothingCanBeWritten) {
  write_file(root_ / "file", "no folder");
  for (int i = 0; i < 2; ++i) EXPECT_EQ(get(root_ / "file/below", "key"), "code");
  std::filesystem::create_directories(root_ / "taken" / checksum("key", 3));  // in the file's place
  EXPECT_EQ(get(root_ / "taken", "key"), "code");
  EXPECT_EQ(made_, 3);
}

TEST_F(KeptKernels, MayBeMadeBySeveralProcessesAtOnce) {
  const std::string code(1 << 20, 'z');
  std::vector<pid_t> children;
  for (int i = 0; i < 6; ++i)
    if (const pid_t child = fork(); child == 0)
      _exit(get(root_, "key", code) == code ? 0 : 1);
    else
      children.push_back(child);
  for (const pid_t child : children) {
    int status = 1;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(get(root_, "key", "other"), code);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(root_), {}), 1);  // no partial files
}

}  // namespace
}  // namespace isograd::gpu
