#pragma once

#include <exception>

#include "core/status.h"

namespace gpumode {

// The Python exception of a failure, as something that C++ can throw and futures can carry. Its
// type survives Work.wait, backward() and futures; `ranks` travel at the end of the text, since
// torch hands nothing but the type and the text to Python. `status` must not be Ok.
std::exception_ptr to_exception(const Status& status);

// Throws to_exception(status) unless it is Ok.
void throw_if_failed(const Status& status);

// The Python class (borrowed, kept alive for ever) that a code is raised as; needs the GIL.
void set_exception_type(Code code, void* py_type);

}  // namespace gpumode
