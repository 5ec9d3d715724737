// AWQ's weights, packed eight per word along the output rows in the order 0 2 4 6 1 3 5 7, as words packed along the inputs.

#include "native.h"

namespace humming_convert {
namespace {

constexpr int kTileN = 64, kTileK = 64;

HC_INLINE void swap_fields(uint32_t *a, uint32_t *b, int count, int shift, uint32_t mask) {
  for (int i = 0; i < count; ++i) {
    const uint32_t t = ((a[i] >> shift) ^ b[i]) & mask;
    b[i] ^= t;
    a[i] ^= t << shift;
  }
}

// Eight words along n for each of eight k: an 8 x 8 transpose of nibbles for all eight words at once.
HC_INLINE void transpose_nibbles(uint32_t (*rows)[8]) {
  for (int i = 0; i < 4; ++i) swap_fields(rows[i], rows[i + 4], 8, 16, 0x0000FFFFu);
  for (int i = 0; i < 8; ++i)
    if (!(i & 2)) swap_fields(rows[i], rows[i + 2], 8, 8, 0x00FF00FFu);
  for (int i = 0; i < 8; i += 2) swap_fields(rows[i], rows[i + 1], 8, 4, 0x0F0F0F0Fu);
}

HC_INLINE void tile_body(const uint32_t *in, int64_t in_stride, uint32_t *out, int64_t out_stride) {
  static const int position_to_row[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  uint32_t columns[8][8][8];  // [nibble position][word along n][word along k]
  for (int kw = 0; kw < kTileK / 8; ++kw) {
    uint32_t rows[8][8];
    for (int k = 0; k < 8; ++k) std::memcpy(rows[k], in + (kw * 8 + k) * in_stride, sizeof(rows[k]));
    transpose_nibbles(rows);
    for (int position = 0; position < 8; ++position)
      for (int word = 0; word < 8; ++word) columns[position][word][kw] = rows[position][word];
  }
  for (int word = 0; word < 8; ++word)
    for (int position = 0; position < 8; ++position)
      std::memcpy(out + (word * 8 + position_to_row[position]) * out_stride, columns[position][word], 32);
}

void tile(const uint32_t *in, int64_t in_stride, uint32_t *out, int64_t out_stride) { tile_body(in, in_stride, out, out_stride); }

#if HC_X86
// Fields of a (above) and b (below) that stand `shift` bits apart change places.
HC_AVX2 HC_INLINE void swap_vectors(__m256i *a, __m256i *b, int shift, __m256i mask) {
  const __m128i count = _mm_cvtsi32_si128(shift);
  const __m256i t = _mm256_and_si256(_mm256_xor_si256(_mm256_srl_epi32(*a, count), *b), mask);
  *b = _mm256_xor_si256(*b, t);
  *a = _mm256_xor_si256(*a, _mm256_sll_epi32(t, count));
}

// 8 x 8 transpose of 32-bit words; row i of the result goes to out + i * stride.
HC_AVX2 HC_INLINE void store_transposed8(const __m256i *in, uint32_t *out, int64_t stride) {
  __m256i a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_epi32(in[i], in[i + 1]);
    a[i + 1] = _mm256_unpackhi_epi32(in[i], in[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(out + i * stride), _mm256_permute2x128_si256(b[i], b[i + 4], 0x20));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(out + (i + 4) * stride), _mm256_permute2x128_si256(b[i], b[i + 4], 0x31));
  }
}

HC_AVX2 void tile_avx2(const uint32_t *in, int64_t in_stride, uint32_t *out, int64_t out_stride) {
  static const int position_to_row[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  __m256i columns[8][8];  // [nibble position][word along k], eight words along n in each
  const __m256i halves = _mm256_set1_epi32(0x0000FFFF), bytes = _mm256_set1_epi32(0x00FF00FF);
  const __m256i nibbles = _mm256_set1_epi32(0x0F0F0F0F);
  for (int kw = 0; kw < kTileK / 8; ++kw) {
    __m256i rows[8];
    for (int k = 0; k < 8; ++k) rows[k] = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(in + (kw * 8 + k) * in_stride));
    for (int i = 0; i < 4; ++i) swap_vectors(rows + i, rows + i + 4, 16, halves);
    for (int i = 0; i < 8; ++i)
      if (!(i & 2)) swap_vectors(rows + i, rows + i + 2, 8, bytes);
    for (int i = 0; i < 8; i += 2) swap_vectors(rows + i, rows + i + 1, 4, nibbles);
    for (int position = 0; position < 8; ++position) columns[position][kw] = rows[position];
  }
  for (int position = 0; position < 8; ++position)
    store_transposed8(columns[position], out + position_to_row[position] * out_stride, 8 * out_stride);
}
#endif

void edge(const uint32_t *in, uint32_t *out, int64_t k, int64_t n, int64_t n0, int64_t k0) {
  static const int row_to_position[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  for (int64_t row = n0; row < n && row < n0 + kTileN; ++row) {
    for (int64_t word = k0 / 8; word < k / 8 && word < (k0 + kTileK) / 8; ++word) {
      uint32_t value = 0;
      for (int64_t i = 0; i < 8; ++i)
        value |= (in[(word * 8 + i) * (n / 8) + row / 8] >> (4 * row_to_position[row % 8]) & 15u) << (4 * i);
      out[row * (k / 8) + word] = value;
    }
  }
}

void in_order(const uint32_t *in, uint32_t *out, int64_t words) {
  for (int64_t i = 0; i < words; ++i) {
    uint32_t word = in[i];
    uint32_t t = (word ^ (word >> 8)) & 0x0000FF00u;  // the halves' nibbles alternate: a perfect shuffle
    word ^= t ^ (t << 8);
    t = (word ^ (word >> 4)) & 0x00F000F0u;
    out[i] = word ^ t ^ (t << 4);
  }
}

}  // namespace

// in and out: words of eight codes each; the zero points of AWQ are packed along the output rows as its weights are.
HC_EXPORT int hc_awq_in_order(const uint32_t *in, uint32_t *out, int64_t words) {
  in_order(in, out, words);
  return 0;
}

// in: [experts, k, n / 8], out: [experts, n, k / 8]. `fast` 0 keeps to the portable code.
HC_EXPORT int hc_awq(const uint32_t *in, uint32_t *out, int64_t experts, int64_t k, int64_t n, int fast) {
  if (k % 8 || n % 8) return 1;
  auto run = tile;
  (void)fast;
#if HC_X86
  if (fast && __builtin_cpu_supports("avx2")) run = tile_avx2;
#endif
  for (int64_t expert = 0; expert < experts; ++expert) {
    const uint32_t *source = in + expert * k * (n / 8);
    uint32_t *target = out + expert * n * (k / 8);
    for (int64_t n0 = 0; n0 < n; n0 += kTileN) {
      for (int64_t k0 = 0; k0 < k; k0 += kTileK) {
        if (n0 + kTileN <= n && k0 + kTileK <= k) run(source + k0 * (n / 8) + n0 / 8, n / 8, target + n0 * (k / 8) + k0 / 8, k / 8);
        else edge(source, target, k, n, n0, k0);
      }
    }
  }
  return 0;
}

}  // namespace humming_convert
