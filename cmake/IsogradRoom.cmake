# isograd_room(NAME SOURCES ... [TESTS ...] [DEPENDS room ...] [LIBRARIES lib ...] [NO_TORCH] [QUICK])
# One static library per room. DEPENDS are the rooms it includes; a room that stands below it in
# src/rooms.txt is refused here, and tests/check_rooms.py checks the #include lines themselves.
# QUICK: for rooms whose time is LibTorch's and the kernels'; compiled as tests are (isograd_quick).
# TESTS become one executable test_<room>, registered with CTest as <room>.
file(STRINGS "${PROJECT_SOURCE_DIR}/src/rooms.txt" _lines REGEX "^[a-z]")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/rooms.txt")
set(ISOGRAD_ROOM_FOLDERS "")
set(ISOGRAD_ROOM_ORDER "")
foreach(_line IN LISTS _lines)
  string(REGEX REPLACE ":.*" "" _room "${_line}")
  list(APPEND ISOGRAD_ROOM_FOLDERS "${_room}")
  string(REPLACE "/" "_" _room "${_room}")
  list(APPEND ISOGRAD_ROOM_ORDER "${_room}")
endforeach()

# Files of a room are compiled several at once: each alone spends more time on LibTorch's templates than on
# itself. 0: each alone (to compile one file quickly again and again).
set(ISOGRAD_UNITY 8 CACHE STRING "source files compiled together; 0 or 1: each alone")

# isograd_unity(TARGET [AT_MOST]): files of a batch.
function(isograd_unity target)
  if(ISOGRAD_UNITY GREATER 1)
    set(_batch ${ISOGRAD_UNITY})
    if(ARGN AND ARGN LESS _batch)
      set(_batch ${ARGN})
    endif()
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${_batch}
      UNITY_BUILD_RELOCATABLE ON)  # from CMake 4.0 on; so that ccache serves several working trees
    # GCC warns of an Impl that holds what its own file has for itself: it takes that file for a header.
    target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
  endif()
endfunction()

function(isograd_room name)
  cmake_parse_arguments(ROOM "NO_TORCH;QUICK" "" "SOURCES;TESTS;DEPENDS;LIBRARIES" ${ARGN})
  list(FIND ISOGRAD_ROOM_ORDER "${name}" _place)
  if(_place EQUAL -1)
    message(FATAL_ERROR "room '${name}' is not listed in src/rooms.txt")
  endif()
  set(_target isograd_${name})
  add_library(${_target} STATIC ${ROOM_SOURCES})
  add_library(isograd::${name} ALIAS ${_target})
  isograd_unity(${_target})
  set_target_properties(${_target} PROPERTIES EXPORT_NAME ${name})
  target_compile_features(${_target} PUBLIC cxx_std_20)  # of whoever uses the installed package, too
  foreach(_room IN LISTS ROOM_DEPENDS)
    list(FIND ISOGRAD_ROOM_ORDER "${_room}" _other)
    if(_other EQUAL -1 OR NOT _other LESS _place)
      message(FATAL_ERROR "room '${name}' may not depend on '${_room}': it does not stand above it in src/rooms.txt")
    endif()
    target_link_libraries(${_target} PUBLIC isograd_${_room})
  endforeach()
  target_include_directories(${_target} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>
    PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${_target} PUBLIC ${ROOM_LIBRARIES} PRIVATE $<BUILD_INTERFACE:isograd_warnings>)
  if(ROOM_QUICK)
    target_link_libraries(${_target} PRIVATE $<BUILD_INTERFACE:isograd_quick>)
  endif()
  if(NOT ROOM_NO_TORCH)
    target_link_libraries(${_target} PUBLIC isograd_torch::torch isograd_fmt)
    target_precompile_headers(${_target} REUSE_FROM isograd_pch)
  endif()
  install(TARGETS ${_target} EXPORT isogradTargets ARCHIVE DESTINATION lib)
  set_property(GLOBAL APPEND PROPERTY ISOGRAD_ROOMS ${name})
  if(ROOM_TESTS AND ISOGRAD_TESTS)
    isograd_test(${name} SOURCES ${ROOM_TESTS} ROOMS ${name} ${ROOM_DEPENDS})
    isograd_unity(test_${name})
  endif()
endfunction()

# isograd_test(NAME SOURCES ... ROOMS ...): one GoogleTest executable, one CTest entry.
function(isograd_test name)
  cmake_parse_arguments(TEST "" "TIMEOUT" "SOURCES;ROOMS;LIBRARIES" ${ARGN})
  if(NOT TEST_TIMEOUT)
    set(TEST_TIMEOUT 1800)  # of a test that hangs: the Python tests run at the same time, on two cores
  endif()
  add_executable(test_${name} ${TEST_SOURCES})
  foreach(_room IN LISTS TEST_ROOMS)
    target_link_libraries(test_${name} PRIVATE isograd_${_room})
  endforeach()
  target_include_directories(test_${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(test_${name} PRIVATE isograd_test_flags rapidcheck isograd_test_main ${TEST_LIBRARIES})
  target_precompile_headers(test_${name} REUSE_FROM isograd_test_pch)
  list(LENGTH TEST_SOURCES _files)
  if(_files GREATER 1)
    isograd_unity(test_${name} 3)  # larger ones than a room's files: one is compiled again and again
  endif()
  add_test(NAME ${name} COMMAND test_${name} --gtest_color=no)
  set_tests_properties(${name} PROPERTIES TIMEOUT ${TEST_TIMEOUT} ENVIRONMENT "OMP_NUM_THREADS=1"
    WORKING_DIRECTORY ${CMAKE_BINARY_DIR})
endfunction()

# The tests of an executable once more, as NAME_as_LEVEL or NAME_by_LIBRARY; FILTER chooses some of them:
#   isograd_test_at_levels(NAME [FILTER pattern])     at each level of instruction sets (tests/processors.py)
#   isograd_test_as_intel(NAME [FILTER pattern])      with MKL's kernels for Intel's processors
#   isograd_test_by_products(NAME [FILTER pattern])   with each library that can multiply in fp32 (src/kernels/matmul)
# A level that the processor lacks is skipped by name.
function(isograd_test_again name how values)
  cmake_parse_arguments(TEST "" "FILTER" "" ${ARGN})
  if(NOT TARGET test_${name})
    return()
  endif()
  if(NOT TEST_FILTER)
    set(TEST_FILTER "*")
  endif()
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  foreach(_value IN LISTS values)
    set(_test ${name}_${how}_${_value})
    set(_command $<TARGET_FILE:test_${name}> --gtest_color=no --gtest_filter=${TEST_FILTER})
    set(_environment "OMP_NUM_THREADS=1" "ISOGRAD_BUILD_DIR=${CMAKE_BINARY_DIR}")
    if(how STREQUAL "as")
      list(PREPEND _command ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tests/processors.py ${_value})
    else()
      list(APPEND _environment "ISOGRAD_PRODUCTS=${_value}")
    endif()
    add_test(NAME ${_test} COMMAND ${_command})
    set_tests_properties(${_test} PROPERTIES TIMEOUT 1800 SKIP_RETURN_CODE 77 ENVIRONMENT "${_environment}"
      WORKING_DIRECTORY ${CMAKE_BINARY_DIR})
  endforeach()
endfunction()
function(isograd_test_at_levels name)
  isograd_test_again(${name} as "scalar;avx2;avx512" ${ARGN})
endfunction()
function(isograd_test_as_intel name)
  if(NOT ISOGRAD_SANITIZE)
    isograd_test_again(${name} as "intel;intel-avx2" ${ARGN})
  endif()
endfunction()
function(isograd_test_by_products name)
  isograd_test_again(${name} by "blas;onednn" ${ARGN})
endfunction()
