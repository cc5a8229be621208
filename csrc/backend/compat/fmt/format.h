// MLX's CUDA headers include fmt for the text of one error, and do not ship it. Where fmt is not installed this
// stands in for it: the text keeps its {} unfilled.
#pragma once

#include <string>

namespace fmt {

template <typename... Args>
std::string format(const char* text, Args&&...) {
  return text;
}

}  // namespace fmt
