// Everything of attention that is not a product with weights, for one instruction set.
#include "vec.isa.h"
#include "norm.isa.h"
#include "matmul.isa.h"
#include "attention_prepare.isa.h"
#include "attention_decode.isa.h"
#include "attention_prefill.isa.h"
