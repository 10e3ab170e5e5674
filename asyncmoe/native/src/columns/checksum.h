// CRC-32 as zlib's, of what a prelude's checksum covers.
#pragma once

#include <cstdint>

namespace columns {

constexpr int kChecksummedBytes = 60;

uint32_t checksum(const uint8_t* data);

}  // namespace columns
