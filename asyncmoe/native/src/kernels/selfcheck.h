// Which instruction sets really give right products here.
#pragma once

#include <string>
#include <vector>

#include "isa.h"

namespace asyncmoe {

const char* isa_name(Isa isa);

// Those that this CPU has, from `plain` to the best one, but for those whose products differ from
// those of `plain`: their names go to `wrong`. A compiler or an emulator may be at fault, and
// nobody could try every CPU.
std::vector<Isa> usable_isas(std::vector<std::string>& wrong);

}  // namespace asyncmoe
