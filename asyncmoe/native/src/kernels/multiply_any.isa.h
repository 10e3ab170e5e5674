// Products for one instruction set, with the registers that it has for them.
#include "vec.isa.h"
#include "tile.isa.h"
#if ASYNCMOE_LEVEL == 4
#include "multiply_amx.isa.h"
#else
#include "multiply.isa.h"
#endif
