// Shared declarations of the native operators. Every function works on plain memory, holds no state and may run in any thread.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) || defined(__i386__)
#define HC_X86 1
#include <immintrin.h>
#define HC_AVX2 __attribute__((target("avx2")))
#else
#define HC_X86 0
#endif

#define HC_INLINE static inline __attribute__((always_inline))
#define HC_EXPORT extern "C" __attribute__((visibility("default")))

namespace humming_convert {

// Arguments of one repack call; the Python side (host/native.py) declares the same fields in the same order.
struct RepackArgs {
  const uint32_t *weight;      // [experts, n, k * bits / 32] packed along k, or [experts, n, k] when not packed
  uint32_t *out;               // [experts, k / rows, n * rows * bits / 32]; rows = 64 (packed-K) or 256 / activation_bits
  const uint32_t *zero_point;  // [experts, n * bits / 32, groups] packed along n ([n, groups] when not packed), or null
  int64_t experts, n, k;
  int64_t zero_group;          // values of k that share a zero point
  int32_t bits, activation_bits;
  int32_t packed;              // the weight (and the zero point) is packed
  int32_t int2fp;              // store sign and distance from the zero point instead of the offset code
  int32_t transpose_mini;      // swap the row and column order of the 8x8 blocks
  int32_t interleave;          // bit 0: low bits, bit 1: top bit of each code take the interleaved position
  int32_t packed_k, native_dequant;
  int32_t source_kind, target_kind;  // Kind of the codes before and after the conversion that is fused in
};

enum Kind : int32_t { kUnsigned = 0, kSigned = 1, kSignMagnitude = 2 };  // uintN (offset binary), intN, floatNe0m(N-1)

inline uint32_t low_mask(int bits) { return static_cast<uint32_t>((uint64_t{1} << bits) - 1); }

// One code of `bits` bits from kind to kind; a magnitude that does not fit saturates.
inline uint32_t convert_code(uint32_t code, int bits, int32_t source, int32_t target) {
  const int64_t mid = int64_t{1} << (bits - 1);
  code &= low_mask(bits);
  int64_t value = int64_t{code} - mid;
  if (source == kSigned) value = (code & mid) ? int64_t{code} - 2 * mid : int64_t{code};
  if (source == kSignMagnitude) value = (code & mid) ? -(int64_t{code} & (mid - 1)) : int64_t{code};
  if (target == kUnsigned) return static_cast<uint32_t>(value + mid) & low_mask(bits);
  if (target == kSigned) return static_cast<uint32_t>(value) & low_mask(bits);
  int64_t magnitude = value < 0 ? -value : value;
  if (magnitude >= mid) magnitude = mid - 1;
  return static_cast<uint32_t>((value < 0 && magnitude != 0 ? mid : 0) | magnitude);
}

// The code that the kernels subtract their zero point from: v - z from z upwards, counted down from the top below it.
inline uint32_t int2fp_code(uint32_t code, uint32_t zero, int bits) {
  return code >= zero ? code - zero : low_mask(bits) - code;
}

// bits bits at value index `index` of a row of packed words.
inline uint32_t read_code(const uint32_t *row, int64_t index, int bits) {
  const int64_t start = index * bits;
  const int shift = static_cast<int>(start % 32);
  uint64_t window = row[start / 32];
  if (shift + bits > 32) window |= uint64_t{row[start / 32 + 1]} << 32;
  return static_cast<uint32_t>(window >> shift) & low_mask(bits);
}

inline uint32_t zero_point_of(const RepackArgs &a, int64_t expert, int64_t row, int64_t group) {
  const int64_t groups = (a.k + a.zero_group - 1) / a.zero_group;
  if (!a.packed) return a.zero_point[(expert * a.n + row) * groups + group];
  const uint32_t *zero = a.zero_point + expert * (a.n * a.bits / 32) * groups;
  const int64_t start = row * a.bits;
  const int shift = static_cast<int>(start % 32);
  uint64_t window = zero[start / 32 * groups + group];
  if (shift + a.bits > 32) window |= uint64_t{zero[(start / 32 + 1) * groups + group]} << 32;
  return static_cast<uint32_t>(window >> shift) & low_mask(a.bits);
}

void repack_generic(const RepackArgs &args);
bool repack_avx2(const RepackArgs &args);  // false: not one of the fast cases, nothing was written

}  // namespace humming_convert
