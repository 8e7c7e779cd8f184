# Finds LibTorch without torch's own CMake package, which asks for a CUDA toolkit when the build has CUDA.
#   ISOGRAD_TORCH   folder holding include/ and lib/ (a `torch` Python package or an unpacked libtorch)
# Defines the imported target isograd_torch::torch and LibTorch_VERSION. Versions of one range alone are
# accepted (DESIGN.md says what was run with which): the code uses headers below torch/csrc, which carry no promise across versions (src/base/torch_versions.hpp).
set(ISOGRAD_TORCH "$ENV{ISOGRAD_TORCH}" CACHE PATH "LibTorch: folder that holds include/ and lib/")
if(NOT ISOGRAD_TORCH)
  find_package(Python3 QUIET COMPONENTS Interpreter)
  if(Python3_FOUND)
    execute_process(COMMAND ${Python3_EXECUTABLE} -c
      "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE _found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    set(ISOGRAD_TORCH "${_found}" CACHE PATH "LibTorch: folder that holds include/ and lib/" FORCE)
  endif()
endif()

find_path(LibTorch_INCLUDE_DIR ATen/core/Tensor.h PATHS "${ISOGRAD_TORCH}/include" NO_DEFAULT_PATH NO_CACHE)
find_library(LibTorch_CPU torch_cpu PATHS "${ISOGRAD_TORCH}/lib" NO_DEFAULT_PATH NO_CACHE)
find_library(LibTorch_C10 c10 PATHS "${ISOGRAD_TORCH}/lib" NO_DEFAULT_PATH NO_CACHE)

if(LibTorch_INCLUDE_DIR)
  foreach(_header torch/headeronly/version.h torch/version.h torch/csrc/api/include/torch/version.h)
    if(EXISTS "${LibTorch_INCLUDE_DIR}/${_header}" AND NOT LibTorch_VERSION)
      file(STRINGS "${LibTorch_INCLUDE_DIR}/${_header}" _lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
      string(REGEX MATCHALL "[0-9]+" _numbers "${_lines}")
      string(REPLACE ";" "." LibTorch_VERSION "${_numbers}")
    endif()
  endforeach()
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorch
  REQUIRED_VARS LibTorch_CPU LibTorch_C10 LibTorch_INCLUDE_DIR
  VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE "looked in '${ISOGRAD_TORCH}'. Set ISOGRAD_TORCH to a folder with include/ and lib/, \
or run `pip install torch==2.13.0`, or let ./dev set it up.")

set(LibTorch_RANGE 2.10 2.15)  # the oldest and the newest; ./dev and tests/test_dev.py read this line, too
if(LibTorch_FOUND)
  list(GET LibTorch_RANGE 0 _oldest)
  list(GET LibTorch_RANGE 1 _newest)
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" _minor "${LibTorch_VERSION}")
  if(_minor VERSION_LESS _oldest OR _minor VERSION_GREATER _newest)
    message(FATAL_ERROR "LibTorch ${LibTorch_VERSION} found in ${ISOGRAD_TORCH}; expected ${_oldest} to ${_newest}. "
      "Other versions are refused until they are tested: install torch==2.13.0 or point ISOGRAD_TORCH at one of these.")
  endif()
endif()

if(LibTorch_FOUND AND NOT TARGET isograd_torch::torch)
  add_library(isograd_torch::torch INTERFACE IMPORTED)
  target_include_directories(isograd_torch::torch SYSTEM INTERFACE
    "${LibTorch_INCLUDE_DIR}" "${LibTorch_INCLUDE_DIR}/torch/csrc/api/include")
  target_link_libraries(isograd_torch::torch INTERFACE "${LibTorch_CPU}" "${LibTorch_C10}")
  target_compile_definitions(isograd_torch::torch INTERFACE USE_DISTRIBUTED USE_C10D)
  # Clang 18 and later spell functions whose template parameters are constrained in a way that g++ does not, which built
  # LibTorch; from 2.13 on it has no such function of its own.
  if(LibTorch_VERSION VERSION_LESS 2.13 AND CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND
     CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 18)
    target_compile_options(isograd_torch::torch INTERFACE -fclang-abi-compat=17)
  endif()
  # A CUDA build registers its kernels from a library nobody calls by name: keep it linked. Without it the program needs
  # none of the nvidia packages but two (CUDA's run time and CUPTI).
  set(ISOGRAD_CUDA AUTO CACHE STRING "GPUs and the backend 'nccl': AUTO (if LibTorch has CUDA), ON, OFF")
  find_library(LibTorch_CUDA torch_cuda PATHS "${ISOGRAD_TORCH}/lib" NO_DEFAULT_PATH NO_CACHE)
  if(LibTorch_CUDA AND NOT ISOGRAD_CUDA STREQUAL "OFF")
    target_link_libraries(isograd_torch::torch INTERFACE
      "-Wl,--push-state,--no-as-needed" "${LibTorch_CUDA}" "-Wl,--pop-state")
  endif()
  # NCCL's group needs headers of CUDA and NCCL. Those of a Python package of torch are next to it (nvidia/*/include; two
  # that it does not bring itself are packages too, which ./dev installs), so no CUDA toolkit is needed; with an
  # unpacked libtorch the toolkit's are taken.
  find_library(LibTorch_C10_CUDA c10_cuda PATHS "${ISOGRAD_TORCH}/lib" NO_DEFAULT_PATH NO_CACHE)
  file(GLOB _nvidia "${ISOGRAD_TORCH}/../nvidia/*/include")
  find_path(LibTorch_CUDART_INCLUDE_DIR cuda_runtime_api.h PATHS ${_nvidia} /usr/local/cuda/include NO_CACHE)
  find_path(LibTorch_CRT_INCLUDE_DIR crt/host_config.h PATHS ${_nvidia} /usr/local/cuda/include NO_CACHE)
  find_path(LibTorch_CCCL_INCLUDE_DIR nv/target PATHS ${_nvidia} /usr/local/cuda/include NO_CACHE)
  find_path(LibTorch_NCCL_INCLUDE_DIR nccl.h PATHS ${_nvidia} /usr/local/cuda/include NO_CACHE)
  set(ISOGRAD_WITH_CUDA OFF)
  if(LibTorch_CUDA AND LibTorch_C10_CUDA AND LibTorch_CUDART_INCLUDE_DIR AND LibTorch_NCCL_INCLUDE_DIR
     AND LibTorch_CRT_INCLUDE_DIR AND LibTorch_CCCL_INCLUDE_DIR AND NOT ISOGRAD_CUDA STREQUAL "OFF")
    set(ISOGRAD_WITH_CUDA ON)
    add_library(isograd_torch::cuda INTERFACE IMPORTED)
    target_include_directories(isograd_torch::cuda SYSTEM INTERFACE
      "${LibTorch_CUDART_INCLUDE_DIR}" "${LibTorch_NCCL_INCLUDE_DIR}" "${LibTorch_CRT_INCLUDE_DIR}"
      "${LibTorch_CCCL_INCLUDE_DIR}")
    target_compile_definitions(isograd_torch::cuda INTERFACE USE_C10D_NCCL)
    target_link_libraries(isograd_torch::cuda INTERFACE "${LibTorch_C10_CUDA}")
    # cuDNN's attention is called through headers of their own; without them LibTorch's flash attention serves.
    find_path(LibTorch_CUDNN_INCLUDE_DIR cudnn_graph.h PATHS ${_nvidia} /usr/local/cuda/include NO_CACHE)
    find_path(LibTorch_CUDNN_FRONTEND_INCLUDE_DIR cudnn_frontend.h PATHS "${ISOGRAD_TORCH}/../include" NO_CACHE)
    if(LibTorch_CUDNN_INCLUDE_DIR AND LibTorch_CUDNN_FRONTEND_INCLUDE_DIR)
      add_library(isograd_torch::cudnn INTERFACE IMPORTED)
      target_include_directories(isograd_torch::cudnn SYSTEM INTERFACE
        "${LibTorch_CUDNN_INCLUDE_DIR}" "${LibTorch_CUDNN_FRONTEND_INCLUDE_DIR}")
      target_link_libraries(isograd_torch::cudnn INTERFACE isograd_torch::cuda ${CMAKE_DL_LIBS})
    endif()
  elseif(ISOGRAD_CUDA STREQUAL "ON")
    message(FATAL_ERROR "ISOGRAD_CUDA is ON; found in ${ISOGRAD_TORCH}: torch_cuda '${LibTorch_CUDA}', c10_cuda "
      "'${LibTorch_C10_CUDA}', cuda_runtime_api.h in '${LibTorch_CUDART_INCLUDE_DIR}', nccl.h in "
      "'${LibTorch_NCCL_INCLUDE_DIR}', crt/host_config.h in '${LibTorch_CRT_INCLUDE_DIR}', nv/target in "
      "'${LibTorch_CCCL_INCLUDE_DIR}'. Install torch==2.13.0 for CUDA with the nvidia packages that it names, "
      "and nvidia-cuda-crt and nvidia-cuda-cccl of the same CUDA.")
  endif()
endif()
