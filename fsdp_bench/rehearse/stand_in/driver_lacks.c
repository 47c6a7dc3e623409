/* Every function of the driver that no other file defines: it is there, is recorded and fails. */
#include "stand_in.h"

#define X(name) UNSUPPORTED(name, cudaErrorNotSupported)
#include "driver_functions.h"
