// Every public header includes this before anything else, so that an older standard is one message.
#pragma once

#if !defined(__cplusplus) || __cplusplus < 202002L
#error isograd needs C++20: link isograd::isograd, which asks CMake for it, or compile with -std=c++20
#include <C++20>  // does not exist, which ends the compilation here
#endif
