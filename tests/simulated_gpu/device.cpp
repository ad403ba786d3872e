// A CUDA device for tests on machines without one: torch tensors on cuda:0 whose memory is the host's, computed with by
// torch's CPU kernels; and streams that put off whatever a GPU may put off. docs/design/simulated-gpu.md says what it
// can show. Loaded with torch.ops.load_library before the first backward pass, and spoken to with ctypes.
#include "driver.h"
#include "tensors.h"
