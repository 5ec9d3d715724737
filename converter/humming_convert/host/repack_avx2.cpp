// The repack of 4-bit and 8-bit weights on x86 with AVX2: whole 64 x 64 blocks as byte shuffles and 4 x 4 transposes.

#include "native.h"

#if HC_X86

namespace humming_convert {
namespace {

constexpr int kUnit = 64;  // columns (k) of one block

// What happens to the codes of a block before they are moved: nothing, or a copy through per-row tables.
struct Prepare {
  bool active;
  bool per_zero_point;
  uint8_t table[16];  // 4-bit codes, when all zero points are alike
};

HC_AVX2 HC_INLINE __m256i load(const uint8_t *at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)); }
HC_AVX2 HC_INLINE void store(uint8_t *at, __m256i value) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(at), value); }
HC_AVX2 HC_INLINE __m256i both(__m128i half) { return _mm256_broadcastsi128_si256(half); }

HC_AVX2 HC_INLINE __m256i lookup_nibbles(__m256i bytes, __m256i table) {
  const __m256i low = _mm256_set1_epi8(0x0F);
  const __m256i first = _mm256_shuffle_epi8(table, _mm256_and_si256(bytes, low));
  const __m256i second = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low));
  return _mm256_or_si256(first, _mm256_slli_epi16(second, 4));
}

// Nibbles of x and y alternating: bytes (x low, y low) and (x high, y high).
HC_AVX2 HC_INLINE void weave(__m256i x, __m256i y, __m256i *low, __m256i *high) {
  const __m256i mask = _mm256_set1_epi8(0x0F);
  *low = _mm256_or_si256(_mm256_and_si256(x, mask), _mm256_slli_epi16(_mm256_and_si256(y, mask), 4));
  *high = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(x, 4), mask), _mm256_andnot_si256(mask, y));
}

// 4 x 4 transpose of 32-bit words inside each 128-bit half.
HC_AVX2 HC_INLINE void transpose4(const __m256i *in, __m256i *out) {
  const __m256i a = _mm256_unpacklo_epi32(in[0], in[1]), b = _mm256_unpacklo_epi32(in[2], in[3]);
  const __m256i c = _mm256_unpackhi_epi32(in[0], in[1]), d = _mm256_unpackhi_epi32(in[2], in[3]);
  out[0] = _mm256_unpacklo_epi64(a, b);
  out[1] = _mm256_unpackhi_epi64(a, b);
  out[2] = _mm256_unpacklo_epi64(c, d);
  out[3] = _mm256_unpackhi_epi64(c, d);
}

// Transposes four vectors of four words and stores their low and high halves as 64 bytes each.
HC_AVX2 HC_INLINE void store_transposed(const __m256i *in, uint8_t *low, uint8_t *high) {
  __m256i t[4];
  transpose4(in, t);
  store(low, _mm256_permute2x128_si256(t[0], t[1], 0x20));
  store(low + 32, _mm256_permute2x128_si256(t[2], t[3], 0x20));
  store(high, _mm256_permute2x128_si256(t[0], t[1], 0x31));
  store(high + 32, _mm256_permute2x128_si256(t[2], t[3], 0x31));
}

// 4-bit weights, 16-bit activations: one block gives four output rows of 512 bytes.
template <bool kNative>
HC_AVX2 void block_w4a16(const uint8_t *in, int64_t stride, uint8_t *out, int64_t out_stride) {
  const __m256i order = both(_mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
  const __m256i outer = _mm256_set1_epi16(static_cast<int16_t>(0xF00F));
  const __m256i second = _mm256_set1_epi16(0x00F0), third = _mm256_set1_epi16(0x0F00);
  for (int r = 0; r < 8; ++r) {
    __m256i even[4], odd[4];
    for (int pair = 0; pair < 4; ++pair) {
      __m256i half[2];
      for (int parity = 0; parity < 2; ++parity) {
        const __m256i v = _mm256_shuffle_epi8(load(in + (pair * 16 + parity * 8 + r) * stride), order);
        half[parity] = v;
        if (kNative) continue;
        const __m256i up = _mm256_and_si256(_mm256_slli_epi16(v, 4), third);
        const __m256i down = _mm256_and_si256(_mm256_srli_epi16(v, 4), second);
        half[parity] = _mm256_or_si256(_mm256_and_si256(v, outer), _mm256_or_si256(up, down));
      }
      if (kNative) {
        even[pair] = _mm256_unpacklo_epi16(half[0], half[1]);
        odd[pair] = _mm256_unpackhi_epi16(half[0], half[1]);
      } else {
        even[pair] = _mm256_unpacklo_epi8(half[0], half[1]);
        odd[pair] = _mm256_unpackhi_epi8(half[0], half[1]);
      }
    }
    store_transposed(even, out + r * 64, out + 2 * out_stride + r * 64);
    store_transposed(odd, out + out_stride + r * 64, out + 3 * out_stride + r * 64);
  }
}

// 8-bit weights, 16-bit activations: one block gives four output rows of 1,024 bytes.
template <bool kNative>
HC_AVX2 void block_w8a16(const uint8_t *in, int64_t stride, uint8_t *out, int64_t out_stride) {
  const __m256i order = kNative ? both(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15))
                                : both(_mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
  for (int half = 0; half < 2; ++half, in += 32, out += 2 * out_stride) {
    for (int r = 0; r < 8; ++r) {
      __m256i v[8], t[8];
      for (int band = 0; band < 8; ++band) v[band] = _mm256_shuffle_epi8(load(in + (band * 8 + r) * stride), order);
      transpose4(v, t);
      transpose4(v + 4, t + 4);
      for (int q = 0; q < 4; ++q) {
        store(out + r * 128 + q * 32, _mm256_permute2x128_si256(t[q], t[q + 4], 0x20));
        store(out + out_stride + r * 128 + q * 32, _mm256_permute2x128_si256(t[q], t[q + 4], 0x31));
      }
    }
  }
}

// The 16 bytes of each half as four words, whose nibbles come from its first and second eight bytes.
template <int kMode>
HC_AVX2 HC_INLINE __m256i words_w4a8(__m256i v) {
  const __m256i other = _mm256_srli_si256(v, 8);
  const __m256i plain = _mm256_unpacklo_epi16(v, other);
  if (kMode == 0) return plain;
  __m256i low, high;
  weave(v, other, &low, &high);
  const __m256i woven = _mm256_unpacklo_epi8(low, high);
  if (kMode == 3) return woven;
  const __m256i top = _mm256_set1_epi8(static_cast<int8_t>(kMode == 2 ? 0x88 : 0x77));
  return _mm256_or_si256(_mm256_and_si256(woven, top), _mm256_andnot_si256(top, plain));
}

// 4-bit weights, 8-bit activations: one block gives two output rows of 1,024 bytes.
template <int kMode>
HC_AVX2 void block_w4a8(const uint8_t *in, int64_t stride, uint8_t *out, int64_t out_stride) {
  for (int half = 0; half < 2; ++half) {
    for (int r = 0; r < 8; ++r) {
      __m256i words[4];
      for (int band = 0; band < 4; ++band) words[band] = words_w4a8<kMode>(load(in + (half * 32 + band * 8 + r) * stride));
      store_transposed(words, out + half * 512 + r * 64, out + out_stride + half * 512 + r * 64);
    }
  }
}

// The packed-K layout: one block is one output row of 2,048 bytes, 16 rows (n) after the other.
template <bool kTranspose, int kMode>
HC_AVX2 void block_packed_k(const uint8_t *in, int64_t stride, uint8_t *out) {
  for (int region = 0; region < 4; ++region) {
    for (int r = 0; r < 8; ++r) {
      const __m256i x = load(in + (region * 16 + r) * stride), y = load(in + (region * 16 + 8 + r) * stride);
      __m256i even, odd;  // words (s = 0, s = 2) and (s = 1, s = 3)
      if (kTranspose) {
        __m256i low, high;
        weave(x, y, &low, &high);
        even = _mm256_unpacklo_epi8(low, high);
        odd = _mm256_unpackhi_epi8(low, high);
      } else {
        even = words_w4a8<kMode>(x);
        odd = words_w4a8<kMode>(y);
      }
      const __m256i a = _mm256_unpacklo_epi32(even, odd), b = _mm256_unpackhi_epi32(even, odd);
      const __m256i first = _mm256_permute2x128_si256(a, b, 0x20), last = _mm256_permute2x128_si256(a, b, 0x31);
      const __m256i q02 = _mm256_unpacklo_epi64(first, last), q13 = _mm256_unpackhi_epi64(first, last);
      store(out + region * 512 + r * 64, _mm256_permute2x128_si256(q02, q13, 0x20));
      store(out + region * 512 + r * 64 + 32, _mm256_permute2x128_si256(q02, q13, 0x31));
    }
  }
}

HC_AVX2 void prepare_row4(const uint8_t *in, const uint8_t *table, uint8_t *out, int bytes) {
  const __m256i codes = both(_mm_loadu_si128(reinterpret_cast<const __m128i *>(table)));
  if (bytes == 32) {
    store(out, lookup_nibbles(load(in), codes));
    return;
  }
  for (int i = 0; i < bytes; ++i) out[i] = static_cast<uint8_t>(table[in[i] & 15] | table[in[i] >> 4] << 4);
}

// Offset binary to sign and magnitude, or back; the lowest code has no magnitude and saturates.
HC_AVX2 HC_INLINE void convert_row8(const uint8_t *in, bool to_sign_magnitude, uint8_t *out) {
  const __m256i top = _mm256_set1_epi8(static_cast<int8_t>(0x80)), low = _mm256_set1_epi8(0x7F);
  for (int i = 0; i < kUnit; i += 32) {
    const __m256i v = load(in + i), rest = _mm256_and_si256(v, low), distance = _mm256_sub_epi8(top, rest);
    const __m256i negative = _mm256_or_si256(_mm256_min_epu8(distance, low), top);
    store(out + i, to_sign_magnitude ? _mm256_blendv_epi8(negative, rest, v) : _mm256_blendv_epi8(_mm256_or_si256(v, top), distance, v));
  }
}

HC_AVX2 void prepare_row8(const uint8_t *in, uint8_t zero, uint8_t *out, int bytes) {
  const __m256i limit = _mm256_set1_epi8(static_cast<int8_t>(zero)), ones = _mm256_set1_epi8(-1);
  int i = 0;
  for (; i + 32 <= bytes; i += 32) {
    const __m256i v = load(in + i);
    const __m256i above = _mm256_cmpeq_epi8(_mm256_max_epu8(v, limit), v);
    store(out + i, _mm256_blendv_epi8(_mm256_xor_si256(v, ones), _mm256_sub_epi8(v, limit), above));
  }
  for (; i < bytes; ++i) out[i] = static_cast<uint8_t>(int2fp_code(in[i], zero, 8));
}

// All codes of a block alike: through one table of nibbles, or from kind to kind.
HC_AVX2 void prepare_block4(const uint8_t *in, int64_t stride, const uint8_t *table, uint8_t *out) {
  const __m256i codes = both(_mm_loadu_si128(reinterpret_cast<const __m128i *>(table)));
  for (int row = 0; row < 64; ++row) store(out + row * (kUnit / 2), lookup_nibbles(load(in + row * stride), codes));
}

HC_AVX2 void convert_block8(const uint8_t *in, int64_t stride, bool to_sign_magnitude, uint8_t *out) {
  for (int row = 0; row < 64; ++row) convert_row8(in + row * stride, to_sign_magnitude, out + row * kUnit);
}

void prepare_block(const RepackArgs &a, const Prepare &prepare, const uint8_t *in, int64_t stride, int64_t expert, int64_t n0,
                   int64_t k0, uint8_t *out) {
  if (a.bits == 4 && !prepare.per_zero_point) return prepare_block4(in, stride, prepare.table, out);
  if (a.bits == 8 && a.source_kind != a.target_kind) return convert_block8(in, stride, a.target_kind == kSignMagnitude, out);
  const int row_bytes = kUnit * a.bits / 8;
  const int64_t step = a.int2fp && a.zero_point && a.zero_group < kUnit ? a.zero_group : kUnit;
  for (int row = 0; row < 64; ++row) {
    for (int64_t column = 0; column < kUnit; column += step) {
      const uint8_t *source = in + row * stride + column * a.bits / 8;
      uint8_t *target = out + row * row_bytes + column * a.bits / 8;
      const int bytes = static_cast<int>(step * a.bits / 8);
      uint32_t zero = 1u << (a.bits - 1);
      if (prepare.per_zero_point) zero = zero_point_of(a, expert, n0 + row, k0 / a.zero_group + column / a.zero_group);
      if (a.bits == 8) {
        prepare_row8(source, static_cast<uint8_t>(zero), target, bytes);
        continue;
      }
      uint8_t table[16];
      for (uint32_t code = 0; code < 16; ++code) table[code] = static_cast<uint8_t>(int2fp_code(code, zero, 4));
      prepare_row4(source, table, target, bytes);
    }
  }
}

Prepare plan_prepare(const RepackArgs &a) {
  Prepare prepare{};
  const bool converts = a.source_kind != a.target_kind;
  prepare.active = converts || a.int2fp;
  prepare.per_zero_point = a.int2fp && a.zero_point != nullptr;
  for (uint32_t code = 0; code < 16 && a.bits == 4; ++code) {
    uint32_t value = converts ? convert_code(code, 4, a.source_kind, a.target_kind) : code;
    if (a.int2fp) value = int2fp_code(value, 8, 4);
    prepare.table[code] = static_cast<uint8_t>(value);
  }
  return prepare;
}

using Block = void (*)(const uint8_t *, int64_t, uint8_t *, int64_t);

template <bool kTranspose, int kMode>
void packed_k(const uint8_t *in, int64_t stride, uint8_t *out, int64_t) { block_packed_k<kTranspose, kMode>(in, stride, out); }

// The block function of a layout, or null when it is not one of the fast ones.
Block block_of(const RepackArgs &a) {
  if (a.activation_bits == 16 && !a.transpose_mini && !a.packed_k && (a.interleave == 3 || a.native_dequant)) {
    if (a.bits == 4) return a.native_dequant ? block_w4a16<true> : block_w4a16<false>;
    if (a.bits == 8) return a.native_dequant ? block_w8a16<true> : block_w8a16<false>;
  }
  if (a.activation_bits != 8 || a.bits != 4 || a.native_dequant) return nullptr;
  if (a.packed_k) {
    if (a.transpose_mini) return a.interleave == 3 ? packed_k<true, 3> : nullptr;
    if (a.interleave == 2) return packed_k<false, 2>;
    return a.interleave == 3 ? packed_k<false, 3> : nullptr;
  }
  if (a.transpose_mini) return nullptr;
  if (a.interleave == 2) return block_w4a8<2>;
  return a.interleave == 3 ? block_w4a8<3> : nullptr;
}

bool can_prepare(const RepackArgs &a) {
  if (a.bits == 8 && a.source_kind != a.target_kind)
    return !a.int2fp && a.source_kind != kSigned && a.target_kind != kSigned;
  if (!a.int2fp || a.zero_point == nullptr) return true;
  if (a.source_kind != a.target_kind) return false;
  return a.zero_group >= kUnit || (kUnit % a.zero_group == 0 && a.zero_group % 2 == 0);
}

}  // namespace

bool repack_avx2(const RepackArgs &a) {
  const Block block = block_of(a);
  if (!__builtin_cpu_supports("avx2") || block == nullptr || !a.packed || a.k % kUnit || !can_prepare(a)) return false;
  const Prepare prepare = plan_prepare(a);
  const int64_t stride = a.k * a.bits / 8;
  const int64_t rows = a.packed_k ? 64 : 256 / a.activation_bits;  // columns (k) of one output row
  const int64_t out_stride = rows * a.n * a.bits / 8;
  alignas(64) uint8_t buffer[64 * kUnit];
  for (int64_t expert = 0; expert < a.experts; ++expert) {
    const uint8_t *in = reinterpret_cast<const uint8_t *>(a.weight) + expert * a.n * stride;
    uint8_t *out = reinterpret_cast<uint8_t *>(a.out) + expert * a.n * stride;
    for (int64_t n0 = 0; n0 < a.n; n0 += 64) {
      for (int64_t k0 = 0; k0 < a.k; k0 += kUnit) {
        const uint8_t *source = in + n0 * stride + k0 * a.bits / 8;
        uint8_t *target = out + k0 / rows * out_stride + n0 * rows * a.bits / 8;
        if (prepare.active) prepare_block(a, prepare, source, stride, expert, n0, k0, buffer);
        if (prepare.active) block(buffer, kUnit * a.bits / 8, target, out_stride);
        else block(source, stride, target, out_stride);
      }
    }
  }
  return true;
}

}  // namespace humming_convert

#else

namespace humming_convert {
bool repack_avx2(const RepackArgs &) { return false; }
}  // namespace humming_convert

#endif
