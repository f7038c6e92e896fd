# SPDX-License-Identifier: BSD-3-Clause
# The installed package: the library, its public headers, and what find_package(trueshard CONFIG) needs. The kernels, plan and
# object libraries are linked PRIVATE into the shared library and are no part of it.
include(CMakePackageConfigHelpers)
set(TRUESHARD_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/trueshard)

# $ORIGIN first, so that libraries copied beside it win over the folder of the torch that it was built against.
set_target_properties(trueshard PROPERTIES INSTALL_RPATH "$ORIGIN;${TRUESHARD_TORCH_DIR}/lib")
if(SKBUILD)  # a wheel holds no links, and lies beside torch
  set_target_properties(trueshard PROPERTIES INSTALL_RPATH "$ORIGIN;$ORIGIN/../../torch/lib")
  set_property(TARGET trueshard PROPERTY VERSION)
  set_property(TARGET trueshard PROPERTY SOVERSION)
endif()

install(TARGETS trueshard EXPORT trueshardTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/plugin/include/trueshard DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h")
install(EXPORT trueshardTargets NAMESPACE trueshard:: DESTINATION ${TRUESHARD_CMAKE_DIR})

configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/trueshardConfig.cmake.in ${PROJECT_BINARY_DIR}/trueshardConfig.cmake
  INSTALL_DESTINATION ${TRUESHARD_CMAKE_DIR} NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor release may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/trueshardConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
    ${PROJECT_BINARY_DIR}/trueshardConfig.cmake ${PROJECT_BINARY_DIR}/trueshardConfigVersion.cmake
    ${PROJECT_SOURCE_DIR}/cmake/TrueshardTorch.cmake
  DESTINATION ${TRUESHARD_CMAKE_DIR})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
