// What DeepSpeed's operators use of torch's own header, which also includes all of torch.nn.
#pragma once
#include <torch/csrc/utils/pybind.h>
#include <torch/types.h>
