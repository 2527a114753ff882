// Runs a compiled step many times, without Python.
//
// This file is compiled together with the source that AOTInductor writes for one step: step.wrapper.cpp, which
// defines a class of torch's public header aoti_runtime/model.h. The library that comes out has one C function,
// fadamgc_repeat, which machine_code.py calls.

// What follows only saves time of compilation, about a third. torch's constructor reads the word "cpu" with
// std::regex; the one below does not. Checks of arguments, which run only if a variable of the environment asks
// for them, are not optimised.
#include <torch/csrc/inductor/aoti_runtime/model_base.h>

namespace torch::aot_inductor {
class AOTInductorModelstep;

template <>
inline AOTInductorModelBase<AOTInductorModelstep>::AOTInductorModelBase(
    size_t inputs, size_t outputs, size_t constants, const std::string&, std::optional<std::string>, bool weights)
    : inputs_info_(inputs), outputs_info_(outputs), constants_info_(constants), include_weights(weights) {
  device_type_ = aoti_torch_device_type_cpu();
  device_idx_ = -1;
}
}  // namespace torch::aot_inductor

#undef AOTI_NOINLINE
#define AOTI_NOINLINE __attribute__((noinline, optimize("O0")))
#include "step.wrapper.cpp"

#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace at {
void set_num_threads(int);
}

namespace {
using Step = torch::aot_inductor::AOTInductorModelstep;

struct Arguments {
  int64_t n;              // number of tensors
  char** data;            // first byte of each tensor
  const int64_t* ndim;    // number of dimensions of each tensor
  const int64_t* dims;    // sizes and strides, one tensor after the other
  const int32_t* dtype;   // type of each tensor
  const int64_t* step;    // bytes from one step to the next; 0 if the tensor is the same in all steps
  const int64_t* part;    // bytes from one part to the next
  int64_t steps;
};

Step& the_step() {  // without constants, so running it changes nothing in it, and threads may share it
  static Step step(std::make_shared<torch::aot_inductor::ConstantMap>(),
                   std::make_shared<std::vector<torch::aot_inductor::ConstantHandle>>(), "cpu", std::nullopt);
  return step;
}

void check(AOTITorchError code) {
  if (code) throw std::runtime_error("a tensor cannot be made");
}

struct NoGrad {
  const bool before = aoti_torch_grad_mode_is_enabled();
  NoGrad() { aoti_torch_grad_mode_set_enabled(false); }
  ~NoGrad() { aoti_torch_grad_mode_set_enabled(before); }
};

void run_part(const Arguments& a, int64_t part) {
  const NoGrad no_grad;
  std::vector<torch::aot_inductor::RAIIAtenTensorHandle> fixed(a.n);
  std::vector<AtenTensorHandle> now(a.n);
  for (int64_t k = 0; k < a.steps; ++k) {
    const int64_t* size = a.dims;
    for (int64_t i = 0; i < a.n; size += 2 * a.ndim[i++]) {
      if (a.step[i] == 0 && k > 0) {
        check(aoti_torch_new_tensor_handle(fixed[i].get(), &now[i]));
        continue;
      }
      char* data = a.data[i] + part * a.part[i] + k * a.step[i];
      check(aoti_torch_create_tensor_from_blob(
          data, a.ndim[i], size, size + a.ndim[i], 0, a.dtype[i], aoti_torch_device_type_cpu(), 0, &now[i]));
      if (a.step[i] == 0) {
        fixed[i] = torch::aot_inductor::RAIIAtenTensorHandle(now[i]);
        check(aoti_torch_new_tensor_handle(fixed[i].get(), &now[i]));
      }
    }
    the_step().run_impl(now.data(), nullptr, nullptr, nullptr);  // takes the handles over
  }
}
}  // namespace

extern "C" int32_t fadamgc_repeat(int64_t n, char** data, const int64_t* ndim, const int64_t* dims,
                                  const int32_t* dtype, const int64_t* step, const int64_t* part,
                                  int64_t steps, int64_t parts, int64_t threads, char* message,
                                  int64_t room) {
  const Arguments arguments{n, data, ndim, dims, dtype, step, part, steps};
  std::vector<std::string> errors(threads);
  std::atomic<int64_t> next{0};  // part; a thread takes the next one, so that a busy core gets fewer
  auto run = [&](int64_t i) {
    try {
      for (int64_t part; (part = next++) < parts;) run_part(arguments, part);
    } catch (const std::exception& error) {
      errors[i] = std::string("failed: ") + error.what();
    } catch (...) {
      errors[i] = "failed";
    }
  };
  std::vector<std::thread> others;
  for (int64_t i = 1; i < threads; ++i)
    others.emplace_back([&run, i] {
      at::set_num_threads(1);  // for this thread, which would otherwise use as many as there are cores
      run(i);
    });
  run(0);
  for (auto& other : others) other.join();
  for (const auto& error : errors)
    if (!error.empty()) {
      std::strncpy(message, error.c_str(), room - 1);
      return 1;
    }
  return 0;
}
