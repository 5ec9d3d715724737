// Operators on streams of packed codes: pack, unpack, convert between kinds, look for one code, fold E2M1 scale offsets.

#include "native.h"

namespace humming_convert {
namespace {

template <class Value>
void pack_values(const Value *in, uint32_t *out, int64_t values, int bits) {
  const uint32_t mask = low_mask(bits);
  for (int64_t block = 0; block < values / 32; ++block, in += 32) {
    uint64_t window = 0;
    int filled = 0;
    for (int i = 0; i < 32; ++i) {
      window |= uint64_t{static_cast<uint32_t>(in[i]) & mask} << filled;
      filled += bits;
      if (filled < 32) continue;
      *out++ = static_cast<uint32_t>(window);
      window >>= 32;
      filled -= 32;
    }
  }
}

template <class Value>
void unpack_values(const uint32_t *in, Value *out, int64_t values, int bits) {
  const uint32_t mask = low_mask(bits);
  for (int64_t block = 0; block < values / 32; ++block) {
    uint64_t window = 0;
    int filled = 0;
    for (int i = 0; i < 32; ++i) {
      if (filled < bits) {
        window |= uint64_t{*in++} << filled;
        filled += 32;
      }
      *out++ = static_cast<Value>(static_cast<uint32_t>(window) & mask);
      window >>= bits;
      filled -= bits;
    }
  }
}

// The value 1 in every field of a word; bits divides 32.
uint32_t every_field(int bits) {
  uint32_t ones = 0;
  for (int at = 0; at < 32; at += bits) ones |= 1u << at;
  return ones;
}

// Offset binary to sign and magnitude, all fields of a word at once; bits divides 32 and is at least 2.
HC_INLINE uint32_t to_sign_magnitude(uint32_t word, uint32_t tops, int bits) {
  const uint32_t low = word & ~tops;
  const uint32_t negative = ~word & tops;                     // fields below the middle
  const uint32_t flags = (negative - (negative >> (bits - 1))) | negative;
  const uint32_t distance = tops - low;                       // middle - low: never borrows, reaches the top bit for low == 0
  const uint32_t overflow = distance & tops & negative;       // code 0: its magnitude does not fit
  const uint32_t magnitude = (distance & ~tops) | (overflow - (overflow >> (bits - 1)));
  return (low & ~flags) | ((magnitude | negative) & flags);
}

HC_INLINE uint32_t from_sign_magnitude(uint32_t word, uint32_t tops, int bits) {
  const uint32_t low = word & ~tops, negative = word & tops;
  const uint32_t flags = (negative - (negative >> (bits - 1))) | negative;
  const uint32_t distance = tops - low;
  return ((low | tops) & ~flags) | (distance & flags);
}

HC_INLINE void convert_words_body(const uint32_t *in, uint32_t *out, int64_t words, int bits, int source, int target) {
  const uint32_t tops = every_field(bits) << (bits - 1);
  const uint32_t flip = source == kSigned ? tops : 0, flop = target == kSigned ? tops : 0;
  if (source == target)  // both sign and magnitude: only a negative zero changes
    for (int64_t i = 0; i < words; ++i) out[i] = to_sign_magnitude(from_sign_magnitude(in[i], tops, bits), tops, bits);
  else if (target == kSignMagnitude)
    for (int64_t i = 0; i < words; ++i) out[i] = to_sign_magnitude(in[i] ^ flip, tops, bits);
  else if (source == kSignMagnitude)
    for (int64_t i = 0; i < words; ++i) out[i] = from_sign_magnitude(in[i], tops, bits) ^ flop;
  else
    for (int64_t i = 0; i < words; ++i) out[i] = in[i] ^ flip ^ flop;
}

HC_INLINE bool contains_body(const uint32_t *in, int64_t words, int bits, uint32_t code) {
  const uint32_t ones = every_field(bits), tops = ones << (bits - 1), wanted = ones * code;
  for (int64_t start = 0; start < words; start += 1024) {
    const int64_t end = start + 1024 < words ? start + 1024 : words;
    uint32_t found = 0;
    for (int64_t i = start; i < end; ++i) {
      const uint32_t word = in[i] ^ wanted;       // a zero field is the code
      found |= (word - ones) & ~word & tops;      // some field is zero iff this is not 0
    }
    if (found) return true;
  }
  return false;
}

void convert_words(const uint32_t *in, uint32_t *out, int64_t words, int bits, int source, int target) {
  convert_words_body(in, out, words, bits, source, target);
}
bool contains_words(const uint32_t *in, int64_t words, int bits, uint32_t code) { return contains_body(in, words, bits, code); }

#if HC_X86
HC_AVX2 void convert_words_avx2(const uint32_t *in, uint32_t *out, int64_t words, int bits, int source, int target) {
  convert_words_body(in, out, words, bits, source, target);
}
HC_AVX2 bool contains_words_avx2(const uint32_t *in, int64_t words, int bits, uint32_t code) {
  return contains_body(in, words, bits, code);
}
#define HC_PICK(name) (__builtin_cpu_supports("avx2") ? name##_avx2 : name)
#else
#define HC_PICK(name) name
#endif

}  // namespace

HC_EXPORT int hc_pack(const void *in, uint32_t *out, int64_t values, int bits, int source_bytes) {
  if (bits < 1 || bits > 16 || values % 32) return 1;
  if (source_bytes == 1) pack_values(static_cast<const uint8_t *>(in), out, values, bits);
  else pack_values(static_cast<const uint32_t *>(in), out, values, bits);
  return 0;
}

HC_EXPORT int hc_unpack(const uint32_t *in, void *out, int64_t values, int bits, int target_bytes) {
  if (bits < 1 || bits > 16 || values % 32) return 1;
  if (target_bytes == 1) unpack_values(in, static_cast<uint8_t *>(out), values, bits);
  else unpack_values(in, static_cast<uint32_t *>(out), values, bits);
  return 0;
}

// words must hold whole groups of 32 codes when bits does not divide 32. in and out may be the same.
HC_EXPORT int hc_convert(const uint32_t *in, uint32_t *out, int64_t words, int bits, int source, int target) {
  if (bits < 1 || bits > 8) return 1;
  if (source == target && source != kSignMagnitude) {
    if (in != out) std::memmove(out, in, static_cast<size_t>(words) * 4);
    return 0;
  }
  if (bits > 1 && 32 % bits == 0) {
    HC_PICK(convert_words)(in, out, words, bits, source, target);
    return 0;
  }
  uint32_t table[256];
  for (uint32_t code = 0; code <= low_mask(bits); ++code) table[code] = convert_code(code, bits, source, target);
  if (words * 32 % bits) return 1;
  const int64_t period = 32 % bits == 0 ? 1 : bits / ((bits & -bits));
  for (int64_t start = 0; start + period <= words; start += period) {
    uint32_t values[32];
    const int64_t count = period * 32 / bits;
    for (int64_t i = 0; i < count; ++i) values[i] = table[read_code(in + start, i, bits)];
    for (int64_t w = 0; w < period; ++w) out[start + w] = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = i * bits;
      out[start + at / 32] |= values[i] << (at % 32);
      if (at % 32 + bits > 32) out[start + at / 32 + 1] |= values[i] >> (32 - at % 32);
    }
  }
  return 0;
}

// 1: some code equals `code`, 0: none does, -1: bad arguments.
HC_EXPORT int hc_contains(const uint32_t *in, int64_t words, int bits, uint32_t code) {
  if (bits < 1 || bits > 8 || words * 32 % bits) return -1;
  if (32 % bits == 0) return HC_PICK(contains_words)(in, words, bits, code) ? 1 : 0;
  for (int64_t i = 0; i < words * 32 / bits; ++i)
    if (read_code(in, i, bits) == code) return 1;
  return 0;
}

// E2M1 codes times 2^-offset, rounded to the nearest E2M1 value (ties away from zero); offsets: one byte per `words` words.
HC_EXPORT int hc_fold_e2m1(const uint32_t *in, uint32_t *out, const uint8_t *offsets, int64_t groups, int64_t words) {
  static const int doubled[8] = {0, 1, 2, 3, 4, 6, 8, 12};
  uint8_t tables[9][256];
  for (int offset = 0; offset < 9; ++offset) {
    uint8_t nibble[16];
    for (int code = 0; code < 16; ++code) {
      const int scaled = doubled[code & 7];  // in units of 2^-offset
      int best = 0;
      while (best < 7 && 2 * scaled >= (doubled[best] + doubled[best + 1]) << offset) ++best;
      nibble[code] = static_cast<uint8_t>((code & 8) | best);
      if (code == 8) nibble[code] = 0;
    }
    for (int byte = 0; byte < 256; ++byte) tables[offset][byte] = static_cast<uint8_t>(nibble[byte & 15] | nibble[byte >> 4] << 4);
  }
  for (int64_t group = 0; group < groups; ++group) {
    const uint8_t *table = tables[offsets[group] < 8 ? offsets[group] : 8];
    const uint8_t *source = reinterpret_cast<const uint8_t *>(in + group * words);
    uint8_t *target = reinterpret_cast<uint8_t *>(out + group * words);
    for (int64_t i = 0; i < words * 4; ++i) target[i] = table[source[i]];
  }
  return 0;
}

// `fast` 0 keeps to the portable code, so that tests can hold one against the other.
HC_EXPORT int hc_repack(const RepackArgs *args, int fast) {
  const RepackArgs &a = *args;
  if (a.bits < 1 || a.bits > 8) return 1;
  if (a.activation_bits != 4 && a.activation_bits != 8 && a.activation_bits != 16) return 2;
  if (a.bits > a.activation_bits) return 3;
  if (a.n % 64) return 4;
  if (a.k % (512 / a.activation_bits)) return 5;
  if (a.packed_k && (a.activation_bits != 8 || a.bits % 2 || a.k % 64)) return 6;
  if (a.zero_point && (a.zero_group <= 0 || (!a.packed && a.experts > 1))) return 7;
  if (!fast || !repack_avx2(a)) repack_generic(a);
  return 0;
}

}  // namespace humming_convert
