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
// Nibbles of x and y alternating: bytes (x low, y low) and (x high, y high).
HC_AVX2 HC_INLINE void weave(__m256i x, __m256i y, __m256i *low, __m256i *high) {
  const __m256i mask = _mm256_set1_epi8(0x0F);
  *low = _mm256_or_si256(_mm256_and_si256(x, mask), _mm256_slli_epi16(_mm256_and_si256(y, mask), 4));
  *high = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(x, 4), mask), _mm256_andnot_si256(mask, y));
}

// Byte b of every word of four vectors as the word b of four: out[w] holds word w of each half, taken apart.
HC_AVX2 HC_INLINE void interleave_bytes(const __m256i *in, __m256i *out) {
  const __m256i a = _mm256_unpacklo_epi8(in[0], in[1]), b = _mm256_unpackhi_epi8(in[0], in[1]);
  const __m256i c = _mm256_unpacklo_epi8(in[2], in[3]), d = _mm256_unpackhi_epi8(in[2], in[3]);
  out[0] = _mm256_unpacklo_epi16(a, c);
  out[1] = _mm256_unpackhi_epi16(a, c);
  out[2] = _mm256_unpacklo_epi16(b, d);
  out[3] = _mm256_unpackhi_epi16(b, d);
}

HC_AVX2 HC_INLINE void transpose4(const __m256i *in, __m256i *out) {
  const __m256i a = _mm256_unpacklo_epi32(in[0], in[1]), b = _mm256_unpacklo_epi32(in[2], in[3]);
  const __m256i c = _mm256_unpackhi_epi32(in[0], in[1]), d = _mm256_unpackhi_epi32(in[2], in[3]);
  out[0] = _mm256_unpacklo_epi64(a, b);
  out[1] = _mm256_unpackhi_epi64(a, b);
  out[2] = _mm256_unpacklo_epi64(c, d);
  out[3] = _mm256_unpackhi_epi64(c, d);
}

HC_AVX2 void tile_avx2(const uint32_t *in, int64_t in_stride, uint32_t *out, int64_t out_stride) {
  static const int position_to_row[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  __m256i columns[2][4][8];  // [nibble of a byte][word along n, and the one four on][word along k]; byte of the word in each
  for (int kw = 0; kw < kTileK / 8; ++kw) {
    __m256i woven[2][4], apart[4];
    for (int pair = 0; pair < 4; ++pair) {
      const uint32_t *row = in + (kw * 8 + pair * 2) * in_stride;
      weave(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(row)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i *>(row + in_stride)), &woven[0][pair], &woven[1][pair]);
    }
    for (int nibble = 0; nibble < 2; ++nibble) {
      interleave_bytes(woven[nibble], apart);
      for (int word = 0; word < 4; ++word) columns[nibble][word][kw] = apart[word];
    }
  }
  for (int word = 0; word < 4; ++word) {
    for (int nibble = 0; nibble < 2; ++nibble) {
      __m256i first[4], last[4];
      transpose4(columns[nibble][word], first);
      transpose4(columns[nibble][word] + 4, last);
      for (int byte = 0; byte < 4; ++byte) {
        uint32_t *row = out + (word * 8 + position_to_row[byte * 2 + nibble]) * out_stride;
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(row), _mm256_permute2x128_si256(first[byte], last[byte], 0x20));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(row + 32 * out_stride), _mm256_permute2x128_si256(first[byte], last[byte], 0x31));
      }
    }
  }
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
    // Two tiles each way fill whole cache lines on both sides before others push them out.
    for (int64_t n1 = 0; n1 < n; n1 += 2 * kTileN) {
      for (int64_t k1 = 0; k1 < k; k1 += 2 * kTileK) {
        for (int i = 0; i < 4; ++i) {
          const int64_t n0 = n1 + i / 2 * kTileN, k0 = k1 + i % 2 * kTileK;
          if (n0 >= n || k0 >= k) continue;
          if (n0 + kTileN <= n && k0 + kTileK <= k) run(source + k0 * (n / 8) + n0 / 8, n / 8, target + n0 * (k / 8) + k0 / 8, k / 8);
          else edge(source, target, k, n, n0, k0);
        }
      }
    }
  }
  return 0;
}

}  // namespace humming_convert
