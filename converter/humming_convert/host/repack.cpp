// The weight layout of Humming's kernels for every width, written for clarity; repack_avx2.cpp holds the common cases.
//
// A block of 64 rows (n) by 64 columns (k) belongs to 32 lanes. Lane 4 * r + q owns the rows congruent to r modulo 8 and,
// of each run of 128 / A columns, the q-th run of 32 / A (A: activation bits). Its 128 codes are numbered by
// (k pair, n half, n pair, n parity, k parity, column) and packed 32 at a time.

#include "native.h"

namespace humming_convert {
namespace {

constexpr int kLanes = 32;
constexpr int kSlots = 128;

int padded_width(int bits) {
  int width = 1;
  while (width < bits) width *= 2;
  return width;
}

// Where the code of (8-row band, column) goes: slot * 32 + q.
void fill_slots(const RepackArgs &a, uint16_t (*slots)[64]) {
  const int run = 32 / a.activation_bits, bands = a.activation_bits * 4;
  const int halves = 16 / a.activation_bits, pairs = a.activation_bits / 4;
  for (int band = 0; band < 8; ++band) {
    for (int column = 0; column < 64; ++column) {
      const int j = column / (4 * run), q = column / run % 4, within = column % run;
      int slot = j / 2;
      slot = slot * halves + band * 8 / bands;
      slot = slot * pairs + band * 8 % bands / 16;
      slot = slot * 4 + (a.transpose_mini ? j % 2 * 2 + band % 2 : band % 2 * 2 + j % 2);
      slots[band][column] = static_cast<uint16_t>((slot * run + within) * kLanes + q);
    }
  }
}

// 64 codes from value index `first` of a packed row; for a width known to the compiler this is a few shifts each.
template <int kBits>
void unpack_row(const uint32_t *row, int64_t first, int64_t columns, uint8_t *codes) {
  const uint32_t *word = row + first * kBits / 32;  // first is a multiple of 32
  for (int64_t half = 0; half < columns; half += 32, word += kBits) {
    for (int i = 0; i < 32; ++i) {
      const int at = i * kBits, shift = at % 32;
      uint32_t code = word[at / 32] >> shift;
      if (shift + kBits > 32) code |= word[at / 32 + 1] << (32 - shift);
      codes[half + i] = static_cast<uint8_t>(code & ((1u << kBits) - 1));
    }
  }
}

using UnpackRow = void (*)(const uint32_t *, int64_t, int64_t, uint8_t *);
const UnpackRow kUnpackRow[9] = {nullptr,       unpack_row<1>, unpack_row<2>, unpack_row<3>, unpack_row<4>,
                                 unpack_row<5>, unpack_row<6>, unpack_row<7>, unpack_row<8>};

void prepare_row(const RepackArgs &a, const uint8_t *converted, int64_t expert, int64_t row, int64_t k0, int64_t columns,
                 uint8_t *codes) {
  if (a.source_kind != a.target_kind)
    for (int64_t i = 0; i < columns; ++i) codes[i] = converted[codes[i]];
  if (!a.int2fp) return;
  for (int64_t start = 0; start < columns;) {
    // The kernel looks its zero point up once per 64 columns when a group is longer than that.
    const int64_t group = start / a.zero_group;
    const int64_t end = (group + 1) * a.zero_group < columns ? (group + 1) * a.zero_group : columns;
    const uint32_t zero = a.zero_point ? zero_point_of(a, expert, row, k0 / a.zero_group + group) : 1u << (a.bits - 1);
    for (int64_t i = start; i < end; ++i) codes[i] = static_cast<uint8_t>(int2fp_code(codes[i], zero, a.bits));
    start = end;
  }
}

void load_block(const RepackArgs &a, const uint16_t (*slots)[64], const uint8_t *converted, int64_t expert, int64_t n0, int64_t k0, uint8_t *codes) {
  const int64_t stride = a.packed ? a.k * a.bits / 32 : a.k;
  const uint32_t mask = low_mask(a.bits);
  const int64_t columns = a.k - k0 < 64 ? a.k - k0 : 64;
  if (columns < 64) std::memset(codes, 0, kSlots * kLanes);
  for (int row = 0; row < 64; ++row) {
    const uint32_t *source = a.weight + (expert * a.n + n0 + row) * stride;
    uint8_t values[64];
    if (a.packed) kUnpackRow[a.bits](source, k0, columns, values);
    else
      for (int64_t i = 0; i < columns; ++i) values[i] = static_cast<uint8_t>(source[k0 + i] & mask);
    prepare_row(a, converted, expert, n0 + row, k0, columns, values);
    const uint16_t *slot = slots[row / 8];
    uint8_t *lane = codes + row % 8 * 4;
    for (int64_t i = 0; i < columns; ++i) lane[slot[i]] = values[i];
  }
}

// 32 slots as `width` words per lane, each field as wide as the next power of two.
HC_INLINE void pack_group_body(const RepackArgs &a, const uint8_t *codes, int group, uint32_t (*words)[kLanes]) {
  const int width = padded_width(a.bits), fields = 32 / width;
  const int run = 32 / a.activation_bits, columns = fields / run;
  const uint32_t top = 1u << (a.bits - 1), low = top - 1;
  for (int word = 0; word < width; ++word) {
    std::memset(words[word], 0, sizeof(words[word]));
    const uint8_t *base = codes + (group * 32 + word * fields) * kLanes;
    for (int field = 0; field < fields; ++field) {
      const int apart = a.native_dequant ? field : field % columns * run + field / columns;
      const uint8_t *low_codes = base + (a.interleave % 2 ? apart : field) * kLanes;
      const uint8_t *top_codes = base + (a.interleave / 2 ? apart : field) * kLanes;
      for (int lane = 0; lane < kLanes; ++lane)
        words[word][lane] |= ((low_codes[lane] & low) | (top_codes[lane] & top)) << (field * width);
    }
  }
}

void pack_group_plain(const RepackArgs &a, const uint8_t *codes, int group, uint32_t (*words)[kLanes]) {
  pack_group_body(a, codes, group, words);
}
#if HC_X86
HC_AVX2 void pack_group_avx2(const RepackArgs &a, const uint8_t *codes, int group, uint32_t (*words)[kLanes]) {
  pack_group_body(a, codes, group, words);
}
#endif

// Widths that are no power of two: the spare bits of every field are filled from the top bits of the next word.
void squeeze(int bits, const uint32_t (*words)[kLanes], uint32_t (*out)[kLanes]) {
  const int width = padded_width(bits);
  auto every_field = [width](uint32_t mask) {
    for (int shift = width; shift < 32; shift *= 2) mask |= mask << shift;
    return mask;
  };
  int word = 0, left = bits;  // left: how many low bits of words[word] are still to be placed
  for (int output = 0; output < bits; ++output) {
    std::memset(out[output], 0, sizeof(out[output]));
    for (int at = 0; at < width;) {
      const int take = left < width - at ? left : width - at;
      const int first = left - take;
      const uint32_t mask = every_field(low_mask(take) << first);
      for (int lane = 0; lane < kLanes; ++lane) {
        const uint32_t part = words[word][lane] & mask;
        out[output][lane] |= at >= first ? part << (at - first) : part >> (first - at);
      }
      at += take;
      left -= take;
      if (left == 0) {
        ++word;
        left = bits;
      }
    }
  }
}

void store_block(const RepackArgs &a, const uint32_t (*words)[kLanes], int64_t expert, int64_t n0, int64_t k0) {
  const int bits = a.bits, halves = 16 / a.activation_bits;
  const int64_t rows = a.packed_k ? 64 : 256 / a.activation_bits;
  const int64_t stride = rows * a.n * bits / 32;
  for (int i = 0; i < a.activation_bits / 4; ++i) {
    if (k0 + i * (256 / a.activation_bits) >= a.k) break;
    uint32_t *row = a.out + (expert * a.k + k0) / rows * stride + (a.packed_k ? 0 : i * stride);
    for (int half = 0; half < halves; ++half) {
      for (int word = 0; word < bits; ++word) {
        const uint32_t *source = words[(i * halves + half) * bits + word];
        int64_t at = rows * n0 * bits / 32 + half * 32 * bits + word;
        if (a.packed_k) {
          const int part = bits / 2;
          at = (n0 / 16 + half * 2 + word / part) * (32 * bits) + i * part + word % part;
        }
        for (int lane = 0; lane < kLanes; ++lane) row[at + lane * bits] = source[lane];
      }
    }
  }
}

}  // namespace

void repack_generic(const RepackArgs &a) {
  uint16_t slots[8][64];
  uint8_t codes[kSlots * kLanes];
  uint32_t wide[8][kLanes], words[32][kLanes];
  auto pack_group = pack_group_plain;
#if HC_X86
  if (__builtin_cpu_supports("avx2")) pack_group = pack_group_avx2;
#endif
  fill_slots(a, slots);
  uint8_t converted[256];
  for (uint32_t code = 0; code <= low_mask(a.bits); ++code)
    converted[code] = static_cast<uint8_t>(convert_code(code, a.bits, a.source_kind, a.target_kind));
  const bool is_power_of_two = (a.bits & (a.bits - 1)) == 0;
  for (int64_t expert = 0; expert < a.experts; ++expert) {
    for (int64_t n0 = 0; n0 < a.n; n0 += 64) {
      for (int64_t k0 = 0; k0 < a.k; k0 += 64) {
        load_block(a, slots, converted, expert, n0, k0, codes);
        for (int group = 0; group < 4; ++group) {
          pack_group(a, codes, group, is_power_of_two ? words + group * a.bits : wide);
          if (!is_power_of_two) squeeze(a.bits, wide, words + group * a.bits);
        }
        store_block(a, words, expert, n0, k0);
      }
    }
  }
}

}  // namespace humming_convert
