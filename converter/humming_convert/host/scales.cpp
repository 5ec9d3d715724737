// Scales and zero points: [n, groups] to [groups, n], the rows of every block of rows in another order on the way.

#include "native.h"

namespace humming_convert {
namespace {

constexpr int kMaxBlock = 256;

template <class Value>
HC_INLINE void corner(const Value *in, int64_t groups, Value *out, int64_t n, const int32_t *order, int64_t first, int64_t rows,
                      int64_t from, int64_t to) {
  for (int64_t group = from; group < to; ++group)
    for (int64_t i = first; i < first + rows; ++i) out[group * n + i] = in[order[i] * groups + group];
}

// `rows` rows of a block, in: the block's first row, out: its first column.
template <class Value>
void block_plain(const Value *in, int64_t groups, Value *out, int64_t n, const int32_t *order, int64_t rows) {
  corner(in, groups, out, n, order, 0, rows, 0, groups);
}

#if HC_X86
template <class Value>
HC_AVX2 HC_INLINE __m128i weave_low(__m128i a, __m128i b) {
  return sizeof(Value) == 1 ? _mm_unpacklo_epi8(a, b) : sizeof(Value) == 2 ? _mm_unpacklo_epi16(a, b) : _mm_unpacklo_epi32(a, b);
}
template <class Value>
HC_AVX2 HC_INLINE __m128i weave_high(__m128i a, __m128i b) {
  return sizeof(Value) == 1 ? _mm_unpackhi_epi8(a, b) : sizeof(Value) == 2 ? _mm_unpackhi_epi16(a, b) : _mm_unpackhi_epi32(a, b);
}

// Squares of as many rows and columns as a vector has elements: weaving halves together log2 times is a transpose.
template <class Value>
HC_AVX2 void block_avx2(const Value *in, int64_t groups, Value *out, int64_t n, const int32_t *order, int64_t rows) {
  constexpr int kSide = 16 / sizeof(Value);
  const int64_t whole_rows = rows / kSide * kSide, whole_groups = groups / kSide * kSide;
  for (int64_t row = 0; row < whole_rows; row += kSide) {
    for (int64_t group = 0; group < whole_groups; group += kSide) {
      __m128i a[kSide], b[kSide];
      for (int i = 0; i < kSide; ++i) a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i *>(in + order[row + i] * groups + group));
      for (int step = 1; step < kSide; step *= 2) {
        for (int i = 0; i < kSide / 2; ++i) {
          b[2 * i] = weave_low<Value>(a[i], a[i + kSide / 2]);
          b[2 * i + 1] = weave_high<Value>(a[i], a[i + kSide / 2]);
        }
        for (int i = 0; i < kSide; ++i) a[i] = b[i];
      }
      for (int i = 0; i < kSide; ++i) _mm_storeu_si128(reinterpret_cast<__m128i *>(out + (group + i) * n + row), a[i]);
    }
    corner(in, groups, out, n, order, row, kSide, whole_groups, groups);
  }
  corner(in, groups, out, n, order, whole_rows, rows - whole_rows, 0, groups);
}
#endif

template <class Value>
void transpose(const Value *in, Value *out, int64_t experts, int64_t n, int64_t groups, const int32_t *order, int64_t block, int fast) {
  auto run = block_plain<Value>;
  (void)fast;
#if HC_X86
  if (fast && __builtin_cpu_supports("avx2")) run = block_avx2<Value>;
#endif
  for (int64_t expert = 0; expert < experts; ++expert, in += n * groups, out += n * groups)
    for (int64_t row = 0; row < n; row += block)
      run(in + row * groups, groups, out + row, n, order, n - row < block ? n - row : block);
}

// Zero points of one block of rows, for one group: unpacked from words `groups` apart, packed again in another order.
HC_INLINE void zero_points_of_block(const uint32_t *in, int64_t groups, uint32_t *out, const int32_t *order, int block, int bits,
                                    int out_bits) {
  uint8_t codes[kMaxBlock];
  uint64_t window = 0;
  int filled = 0;
  for (int i = 0; i < block; ++i) {
    if (filled < bits) {
      window |= uint64_t{*in} << filled;
      in += groups;
      filled += 32;
    }
    codes[i] = static_cast<uint8_t>(static_cast<uint32_t>(window) & low_mask(bits));
    window >>= bits;
    filled -= bits;
  }
  const int fields = 32 / out_bits;
  for (int word = 0; word < block / fields; ++word) {
    uint32_t value = 0;
    for (int field = 0; field < fields; ++field) value |= uint32_t{codes[order[word * fields + field]]} << (field * out_bits);
    out[word] = value;
  }
}

}  // namespace

// in: [experts, n * bits / 32, groups] packed along n, out: [experts, groups, n * out_bits / 32]; out_bits is 4 or 8.
// Code i of a block of `block` codes is code order[i] of that block of rows.
HC_EXPORT int hc_zero_points(const uint32_t *in, uint32_t *out, int64_t experts, int64_t n, int64_t groups, int bits, int out_bits,
                             const int32_t *order, int64_t block) {
  if (bits < 1 || bits > 8 || (out_bits != 4 && out_bits != 8) || bits > out_bits) return 1;
  if (block < 32 || block > kMaxBlock || block % 32 || n % block) return 1;
  for (int64_t i = 0; i < block; ++i)
    if (order[i] < 0 || order[i] >= block) return 1;
  const int64_t in_words = block * bits / 32, out_words = block * out_bits / 32;
  for (int64_t expert = 0; expert < experts; ++expert)
    for (int64_t row = 0; row < n / block; ++row, in += in_words * groups)
      for (int64_t group = 0; group < groups; ++group)
        zero_points_of_block(in + group, groups, out + ((expert * groups + group) * (n / block) + row) * out_words, order,
                             static_cast<int>(block), bits, out_bits);
  return 0;
}

// in: [experts, n, groups], out: [experts, groups, n]; column i of a block of columns is row order[i] of that block of rows.
// Without an order rows stay in theirs, and n need not be whole blocks. `fast` 0 keeps to the portable code.
HC_EXPORT int hc_transpose(const void *in, void *out, int64_t experts, int64_t n, int64_t groups, int element_bytes,
                           const int32_t *order, int64_t block, int fast) {
  int32_t rows[kMaxBlock];
  if (order == nullptr) {
    block = kMaxBlock;
    for (int i = 0; i < kMaxBlock; ++i) rows[i] = i;
  } else {
    if (block < 1 || block > kMaxBlock || n % block) return 1;
    for (int64_t i = 0; i < block; ++i) {
      if (order[i] < 0 || order[i] >= block) return 1;
      rows[i] = order[i];
    }
  }
  if (element_bytes == 1) transpose(static_cast<const uint8_t *>(in), static_cast<uint8_t *>(out), experts, n, groups, rows, block, fast);
  else if (element_bytes == 2) transpose(static_cast<const uint16_t *>(in), static_cast<uint16_t *>(out), experts, n, groups, rows, block, fast);
  else if (element_bytes == 4) transpose(static_cast<const uint32_t *>(in), static_cast<uint32_t *>(out), experts, n, groups, rows, block, fast);
  else return 1;
  return 0;
}

}  // namespace humming_convert
