#include "c10d/exceptions.h"

#include <torch/csrc/Exceptions.h>

#include <array>
#include <string>

namespace gpumode {
namespace {

constexpr size_t kNumCodes = static_cast<size_t>(Code::Internal) + 1;

std::array<PyObject*, kNumCodes>& python_types() {
  static std::array<PyObject*, kNumCodes> types{};
  return types;
}

std::string text_of(const Status& status) {
  std::string text = status.message.empty() ? status.str() : status.message;
  if (status.ranks.empty()) {
    return text;
  }
  text += " [ranks: ";
  for (size_t i = 0; i < status.ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(status.ranks[i]);
  }
  return text + "]";
}

// torch asks a PyTorchError for its Python type wherever it crosses into Python; any other C++
// subclass of DistBackendError arrives as the plain base class.
struct CollectiveError : torch::PyTorchError {
  explicit CollectiveError(const Status& status)
      : torch::PyTorchError(text_of(status)), code(status.code) {}

  PyObject* python_type() override {
    PyObject* type = python_types()[static_cast<size_t>(code)];
    return type != nullptr ? type : PyExc_RuntimeError;
  }

  Code code;
};

}  // namespace

void set_exception_type(Code code, void* py_type) {
  auto* type = static_cast<PyObject*>(py_type);
  Py_INCREF(type);
  std::swap(python_types()[static_cast<size_t>(code)], type);
  Py_XDECREF(type);
}

std::exception_ptr to_exception(const Status& status) {
  return std::make_exception_ptr(CollectiveError(status));
}

void throw_if_failed(const Status& status) {
  if (!status.ok()) {
    throw CollectiveError(status);
  }
}

}  // namespace gpumode
