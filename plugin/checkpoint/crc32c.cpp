// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/checkpoint/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace trueshard::checkpoint {

namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // bit-reversed

// a * b modulo the polynomial, both in the bit-reversed form of the sums (bit 31 is x^0).
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b & 1) ? (b >> 1) ^ kPolynomial : b >> 1;
  }
  return product;
}

// x^(8 * bytes) modulo the polynomial: what `bytes` zero bytes multiply a sum with.
constexpr uint32_t shift_factor(uint64_t bytes) {
  uint32_t factor = 1u << 31, power = 1u << 23;  // x^0, x^8
  for (; bytes != 0; bytes >>= 1) {
    if (bytes & 1) factor = multiply(factor, power);
    power = multiply(power, power);
  }
  return factor;
}

using Tables = std::array<std::array<uint32_t, 256>, 8>;
constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int k = 0; k < 8; ++k) crc = (crc & 1) ? (crc >> 1) ^ kPolynomial : crc >> 1;
    tables[0][i] = crc;
  }
  for (uint32_t i = 0; i < 256; ++i) {
    for (size_t t = 1; t < 8; ++t) tables[t][i] = (tables[t - 1][i] >> 8) ^ tables[0][tables[t - 1][i] & 255];
  }
  return tables;
}
constexpr Tables kTables = make_tables();

uint32_t extend_portable(uint32_t crc, const unsigned char* data, size_t bytes) {
  for (; bytes >= 8; bytes -= 8, data += 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    word ^= crc;
    crc = 0;
    for (size_t i = 0; i < 8; ++i) crc ^= kTables[7 - i][(word >> (8 * i)) & 255];
  }
  for (; bytes > 0; --bytes) crc = (crc >> 8) ^ kTables[0][(crc ^ *data++) & 255];
  return crc;
}

#if defined(__x86_64__)
// Three streams at a time: the instruction has a latency of three cycles and starts one each cycle.
constexpr size_t kStream = 4096;  // bytes
constexpr uint32_t kOneStream = shift_factor(kStream), kTwoStreams = shift_factor(2 * kStream);

// Multiplication by a constant, a byte of the sum at a time.
using ShiftTable = std::array<std::array<uint32_t, 256>, 4>;
constexpr ShiftTable make_shift_table(uint32_t factor) {
  ShiftTable table{};
  for (uint32_t byte = 0; byte < 4; ++byte) {
    for (uint32_t i = 0; i < 256; ++i) table[byte][i] = multiply(i << (8 * byte), factor);
  }
  return table;
}
uint32_t shift(const ShiftTable& table, uint32_t crc) {
  return table[0][crc & 255] ^ table[1][(crc >> 8) & 255] ^ table[2][(crc >> 16) & 255] ^ table[3][crc >> 24];
}
const ShiftTable kShiftOne = make_shift_table(kOneStream), kShiftTwo = make_shift_table(kTwoStreams);

__attribute__((target("sse4.2"))) uint32_t extend_sse42(uint32_t crc, const unsigned char* data, size_t bytes) {
  const auto word = [](const unsigned char* at) {
    uint64_t value;
    std::memcpy(&value, at, 8);
    return value;
  };
  for (; bytes >= 3 * kStream; bytes -= 3 * kStream, data += 3 * kStream) {
    uint64_t a = crc, b = 0, c = 0;
    for (size_t i = 0; i < kStream; i += 8) {
      a = _mm_crc32_u64(a, word(data + i));
      b = _mm_crc32_u64(b, word(data + kStream + i));
      c = _mm_crc32_u64(c, word(data + 2 * kStream + i));
    }
    crc = shift(kShiftTwo, static_cast<uint32_t>(a)) ^ shift(kShiftOne, static_cast<uint32_t>(b)) ^
          static_cast<uint32_t>(c);
  }
  uint64_t wide = crc;
  for (; bytes >= 8; bytes -= 8, data += 8) wide = _mm_crc32_u64(wide, word(data));
  crc = static_cast<uint32_t>(wide);
  for (; bytes > 0; --bytes) crc = _mm_crc32_u8(crc, *data++);
  return crc;
}
#endif

using Extend = uint32_t (*)(uint32_t, const unsigned char*, size_t);
Extend choose() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return extend_sse42;
#endif
  return extend_portable;
}

}  // namespace

uint32_t crc32c(const void* data, size_t bytes, uint32_t crc) {
  static const Extend extend = choose();
  return ~extend(~crc, static_cast<const unsigned char*>(data), bytes);
}

uint32_t crc32c_combine(uint32_t first, uint32_t second, uint64_t second_bytes) {
  return multiply(shift_factor(second_bytes), first) ^ second;
}

// Without the inversions before and after, a sum is linear: that of the whole is the xor of those of its parts, each
// followed by the zeros that stand for what comes after it.
uint32_t crc32c_share(uint32_t crc, uint64_t bytes, uint64_t bytes_after) {
  const uint32_t linear = ~crc ^ multiply(shift_factor(bytes), ~0u);
  return multiply(shift_factor(bytes_after), linear);
}
uint32_t crc32c_of_shares(uint32_t shares, uint64_t total_bytes) {
  return ~(shares ^ multiply(shift_factor(total_bytes), ~0u));
}

uint32_t crc32c_portable(const void* data, size_t bytes, uint32_t crc) {
  return ~extend_portable(~crc, static_cast<const unsigned char*>(data), bytes);
}

}  // namespace trueshard::checkpoint
