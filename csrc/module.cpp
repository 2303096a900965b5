#include <pybind11/chrono.h>
#include <torch/extension.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/control_plane/Handlers.hpp>

#include "c10d/backend.h"
#include "c10d/engine_choice.h"
#include "c10d/exceptions.h"
#include "c10d/group.h"
#include "c10d/recovery.h"
#include "ops/library.h"
#include "optim/table.h"
#ifdef GPUMODE_WITH_CUDA
#include "symm/copy.h"
#endif

// Everything that Python sees of the extension. No function here waits with the GIL held.
namespace gpumode {
namespace {

namespace py = pybind11;
using NoGil = py::call_guard<py::gil_scoped_release>;
using Milliseconds = std::chrono::milliseconds;

void bind_options(py::module_& m) {
  py::class_<BackendOptions, ::c10d::Backend::Options, c10::intrusive_ptr<BackendOptions>>(
      m, "Options", "What a group is created with; copied with copy.deepcopy.")
      .def(py::init<Milliseconds>(), py::arg("timeout") = kBackendDefaultTimeout)
      .def("__copy__", [](const BackendOptions& self) { return self.copy(); })
      .def("__deepcopy__", [](const BackendOptions& self, py::dict) { return self.copy(); })
#ifndef C10D_BACKEND_HAS_RECONFIGURE
      .def_readwrite("enable_reconfigure", &BackendOptions::enable_reconfigure)
#endif
      .def_readwrite("group_desc", &BackendOptions::group_desc)
      .def_readwrite("spin", &BackendOptions::spin)
      .def_readwrite("flight_record", &BackendOptions::flight_record);
}

// (code, message, ranks), or None while the group works.
py::object failure_of(const Backend& backend) {
  Status status;
  {
    py::gil_scoped_release release;
    status = backend.failure();
  }
  if (status.ok()) {
    return py::none();
  }
  return py::make_tuple(name(status.code), status.message, status.ranks);
}

void bind_backend(py::module_& m) {
  py::class_<Backend, ::c10d::Backend, c10::intrusive_ptr<Backend>>(
      m, "Backend", "torch.distributed's backend on a gpumode communicator.")
      .def(py::init<Backend::StorePtr, int, int, c10::intrusive_ptr<BackendOptions>>(),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"), NoGil())
      .def_property_readonly("options", &Backend::options)
      .def("_set_default_timeout", &Backend::setTimeout, py::arg("timeout"), NoGil())
      .def("rank", &Backend::current_rank)
      .def("size", &Backend::current_size)
      .def("uuid", &Backend::current_uuid)
      .def("members", &Backend::members)
      .def("initial_ranks", &Backend::initial_ranks)
      .def("coalesces_elsewhere", &Backend::coalesces_elsewhere)
      .def("failure", &failure_of)
      .def("id", &Backend::id)
      .def("set_global_ranks", &Backend::set_global_ranks, py::arg("ranks"))
      .def("handle", &Backend::reconfigure_handle)
      .def(
          "rebuild",
          [](Backend& self, int64_t uuid, const std::vector<std::string>& handles,
             Milliseconds timeout) { throw_if_failed(self.rebuild(uuid, handles, timeout)); },
          py::arg("uuid"), py::arg("handles"), py::arg("timeout"), NoGil())
      .def("begin_rebuild", &Backend::begin_rebuild, py::arg("timeout"), py::arg("min_size"),
           NoGil())
      .def(
          "retried",
          [](Backend& self, const py::function& call, std::optional<Milliseconds> timeout,
             std::optional<int> min_size) {
            RetryScope scope(&self, timeout ? to_duration(*timeout) : self.timeout(), min_size);
            call();
            py::tuple contributors(scope.contributors.size());
            for (size_t i = 0; i < scope.contributors.size(); ++i) {
              contributors[i] = scope.contributors[i];
            }
            return py::make_tuple(std::move(contributors), scope.num_attempts);
          },
          py::arg("call"), py::arg("timeout"), py::arg("min_size"),
          "Calls `call()`, in which collectives of this group are retried; returns who contributed "
          "to the last of them, and after how many attempts.")
      // torch calls it on ranks that a split leaves out: nothing is shared between siblings here.
      .def("perform_nocolor_split", [](Backend&, const at::Device&) {}, py::arg("device"));
}

// torch's registry of handlers outlives Python, so it gets names instead of a function.
void serve(const std::string& endpoint, const std::string& module, const std::string& function) {
  namespace control_plane = ::c10d::control_plane;
  control_plane::registerHandler(endpoint, [module, function](const control_plane::Request& request,
                                                              control_plane::Response& response) {
    const py::gil_scoped_acquire gil;
    try {
      const auto answer = py::module_::import(module.c_str()).attr(function.c_str());
      response.setContent(answer(request.getParam("count")).cast<std::string>(),
                          "application/json");
      response.setStatus(200);
    } catch (const py::error_already_set& error) {
      response.setContent(error.what(), "text/plain");
      response.setStatus(500);
    }
  });
}

void bind_rebuild(py::module_& m) {
  py::class_<Rebuild>(m, "Rebuild", "Rebuilds a group step by step; see core/succession.h.")
      .def(
          "step",
          [](Rebuild& self) -> std::optional<double> {
            const auto pause = self.step();
            if (!pause) {
              return std::nullopt;
            }
            return std::chrono::duration<double>(*pause).count();
          },
          NoGil(), "One step. Returns for how long to sleep, in s, or None when all is done.")
      .def("agreed", &Rebuild::agreed)
      .def("close", &Rebuild::close, NoGil(), "Ends it where it is.");
}

void bind_optim(py::module_& m) {
  using optim::GradSums;
  using optim::Master;
  using optim::Scale;
  using optim::Table;
  using MaybeTensor = std::optional<at::Tensor>;
  py::enum_<Master>(m, "Master", "Where the exact value of a parameter is kept.")
      .value("NONE", Master::None)
      .value("F32", Master::F32)
      .value("REMAINDER16", Master::Remainder16);
  py::class_<Scale>(m, "Scale", "What gradients are multiplied by; see optim/table.h.")
      .def(py::init([](const MaybeTensor& grad_scale, const MaybeTensor& found_inf,
                       const MaybeTensor& grad_sum, const std::optional<double>& max_norm) {
             constexpr double kNone = std::numeric_limits<double>::infinity();
             return Scale{grad_scale.value_or(at::Tensor()), found_inf.value_or(at::Tensor()),
                          grad_sum.value_or(at::Tensor()), max_norm.value_or(kNone)};
           }),
           py::kw_only(), py::arg("grad_scale") = py::none(), py::arg("found_inf") = py::none(),
           py::arg("grad_sum") = py::none(), py::arg("max_norm") = py::none());
  py::class_<GradSums>(m, "GradSums", "Squared norms of gradients; see optim/table.h.")
      .def_readonly("each", &GradSums::each)
      .def_readonly("total", &GradSums::total)
      .def_readonly("is_bad", &GradSums::is_bad);
  py::class_<Table>(m, "Table", "The parameters of one optimizer; see optim/table.h.")
      .def(py::init(&Table::make), py::arg("rule"), py::arg("device"))
      .def(
          "add",
          [](Table& self, const at::Tensor& param, const MaybeTensor& owner, int64_t group,
             int64_t number) {
            return self.add(param, owner.value_or(at::Tensor()), group, number);
          },
          py::arg("param"), py::arg("owner"), py::arg("group"), py::arg("number"))
      .def(
          "set_state",
          [](Table& self, int64_t index, const MaybeTensor& step,
             const std::vector<MaybeTensor>& states, const MaybeTensor& master, Master kind,
             const MaybeTensor& scalar) {
            optim::ParamState state{step.value_or(at::Tensor()),
                                    {},
                                    master.value_or(at::Tensor()),
                                    kind,
                                    scalar.value_or(at::Tensor())};
            for (const auto& s : states) state.states.push_back(s.value_or(at::Tensor()));
            self.set_state(index, std::move(state));
          },
          py::arg("index"), py::arg("step"), py::arg("states"), py::arg("master"), py::arg("kind"),
          py::arg("scalar"))
      .def(
          "set_one_state",
          [](Table& self, int64_t index, int64_t which, const MaybeTensor& state) {
            self.set_one_state(index, which, state.value_or(at::Tensor()));
          },
          py::arg("index"), py::arg("which"), py::arg("state"))
      .def(
          "set_grad",
          [](Table& self, int64_t index, const MaybeTensor& grad) {
            self.set_grad(index, grad.value_or(at::Tensor()));
          },
          py::arg("index"), py::arg("grad"))
      .def("set_hyper", &Table::set_hyper, py::arg("group"), py::arg("values"))
      .def("set_hyper_tensor", &Table::set_hyper_tensor, py::arg("hyper"))
      .def("set_rounding", &Table::set_rounding, py::arg("stochastic"), py::arg("seed"))
      .def("without_state", &Table::without_state, NoGil())
      .def("grad_sums", &Table::grad_sums, py::arg("scale"), py::arg("needs_each"), NoGil())
      .def(
          "start",
          [](Table& self, const Scale& scale) -> MaybeTensor {
            const at::Tensor sums = self.start(scale);
            return sums.defined() ? MaybeTensor(sums) : std::nullopt;
          },
          py::arg("scale"), NoGil())
      .def(
          "finish",
          [](Table& self, const Scale& scale, const MaybeTensor& sums) {
            self.finish(scale, sums.value_or(at::Tensor()));
          },
          py::arg("scale"), py::arg("sums"), NoGil())
      .def("was_recorded", &Table::was_recorded);
  m.def(
      "same_objects",
      [](const py::list& a, const py::list& b) {
        const Py_ssize_t size = PyList_GET_SIZE(a.ptr());
        bool same = size == PyList_GET_SIZE(b.ptr());
        for (Py_ssize_t i = 0; i < size && same; ++i) {
          same = PyList_GET_ITEM(a.ptr(), i) == PyList_GET_ITEM(b.ptr(), i);
        }
        return same;
      },
      py::arg("a"), py::arg("b"), "Whether two lists hold the same objects.");
  m.attr("MAX_HYPER") = optim::kMaxHyper;
#ifdef GPUMODE_WITH_CUDA
  m.def(
      "copy_outside_capture",
      [](const at::Tensor& device, const at::Tensor& host) {
        throw_if_failed(optim::copy_outside_capture(
            device.mutable_data_ptr(), host.const_data_ptr(), static_cast<int64_t>(host.nbytes())));
      },
      py::arg("device"), py::arg("host"), NoGil(),
      "Copies a contiguous tensor to the device, beside the capture of a CUDA graph.");
#endif
  m.def(
      "hyper_of_rule", [](const std::string& name) { return optim::rule(name).hyper; },
      py::arg("rule"), "The names of a rule's hyper-parameters, in order.");
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "gpumode's C++ side";
  py::module_::import("torch.distributed");  // registers the base classes
  bind_options(m);
  bind_backend(m);
  bind_rebuild(m);
  bind_optim(m);
  ops::define_all();

#ifndef GPUMODE_C10D_MUTABLE_RANK
  m.def(
      "make_group",
      [](Backend::StorePtr store, c10::intrusive_ptr<Backend> backend) {
        return c10::intrusive_ptr<::c10d::ProcessGroup>(
            c10::make_intrusive<Group>(std::move(store), std::move(backend)));
      },
      py::arg("store"), py::arg("backend"),
      "A process group whose rank and size follow reconfigure(), for torch before 2.14.");
#endif
  m.def(
      "set_exception_type",
      [](const std::string& code, const py::type& type) {
        for (int i = 0; i <= static_cast<int>(Code::Internal); ++i) {
          if (code == name(static_cast<Code>(i))) {
            set_exception_type(static_cast<Code>(i), type.ptr());
            return;
          }
        }
        throw py::value_error("code: unknown code " + code);
      },
      py::arg("code"), py::arg("type"), "The class that failures of this code are raised as.");
#ifdef GPUMODE_WITH_CUDA
  m.def(
      "copy",
      [](uintptr_t dst, uintptr_t src, int64_t nbytes, int num_sms, uintptr_t stream) {
        throw_if_failed(copy(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src),
                             nbytes, num_sms, reinterpret_cast<void*>(stream)));
      },
      py::arg("dst"), py::arg("src"), py::arg("nbytes"), py::arg("num_sms"), py::arg("stream"),
      NoGil(), "Copies bytes between addresses that the current CUDA device can access.");
#endif
  m.def(
      "flight_record",
      [] {
        std::string pickled;
        {
          py::gil_scoped_release release;
          pickled = pickle_flight_records(flight_records(), Vocabulary::Ours);
        }
        return py::bytes(pickled);
      },
      "The flight record of all groups of this process, pickled.");
  m.def("serve", &serve, py::arg("endpoint"), py::arg("module"), py::arg("function"),
        "Lets torch's worker server answer requests to an endpoint with function(count) of a "
        "module, text of JSON.");
  m.def("shutdown_all", &shutdown_all, NoGil(),
        "Shuts down every group of this process; called at exit.");
}

}  // namespace gpumode
