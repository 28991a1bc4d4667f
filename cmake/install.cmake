# The shared library beside the static one, and what `cmake --install` and CPack carry.
include(GNUInstallDirs)

# The ABI: params structs grow by their struct_size, symbols by nodes of the version script; SOVERSION rises when neither is enough.
add_library(moesaic_shared SHARED $<TARGET_OBJECTS:moesaic_objects> ${MOESAIC_ISA_OBJECTS})
target_link_libraries(moesaic_shared PRIVATE moesaic_objects)
set_target_properties(moesaic_shared PROPERTIES OUTPUT_NAME moesaic VERSION ${PROJECT_VERSION} SOVERSION 0
	LINK_DEPENDS ${PROJECT_SOURCE_DIR}/cmake/libmoesaic.map)
target_link_options(moesaic_shared PRIVATE -Wl,--version-script=${PROJECT_SOURCE_DIR}/cmake/libmoesaic.map)
if(NOT MOESAIC_SANITIZE)
	target_link_options(moesaic_shared PRIVATE -Wl,--no-undefined)
endif()

set(PC_LIBDIR "${CMAKE_INSTALL_FULL_LIBDIR}")
set(PC_INCLUDEDIR "${CMAKE_INSTALL_FULL_INCLUDEDIR}")
# Not Requires.private: pkg-config --static would ask for StarPU's own static libraries, which no distribution has.
string(JOIN " " PC_PRIVATE ${STARPU_LDFLAGS} ${HWLOC_LDFLAGS} ${OPENBLAS_LDFLAGS} ${CJSON_LDFLAGS})
configure_file(cmake/moesaic.pc.in moesaic.pc @ONLY)

install(TARGETS moesaic moesaic_shared ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES include/moesaic.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${CMAKE_BINARY_DIR}/moesaic.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
install(FILES README.md LICENSE CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY docs/ DESTINATION ${CMAKE_INSTALL_DOCDIR}/docs FILES_MATCHING PATTERN "*.md")
install(DIRECTORY examples/ DESTINATION ${CMAKE_INSTALL_DOCDIR}/examples FILES_MATCHING PATTERN "*.c")
install(DIRECTORY python/moesaic DESTINATION ${CMAKE_INSTALL_DATADIR}/moesaic/python FILES_MATCHING PATTERN "*.py")
install(FILES python/requirements.txt DESTINATION ${CMAKE_INSTALL_DATADIR}/moesaic)
if(TARGET moesaic_trace)
	install(TARGETS moesaic_trace RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

# From the option tables, so after the program.
set(pages ${CMAKE_BINARY_DIR}/pages)
file(MAKE_DIRECTORY ${pages})
add_custom_command(OUTPUT ${pages}/moesaic.1 ${pages}/moesaic ${pages}/_moesaic
	COMMAND moesaic_tool --man > ${pages}/moesaic.1
	COMMAND moesaic_tool --completion bash > ${pages}/moesaic
	COMMAND moesaic_tool --completion zsh > ${pages}/_moesaic
	DEPENDS moesaic_tool VERBATIM)
add_custom_target(pages ALL DEPENDS ${pages}/moesaic.1)
install(TARGETS moesaic_tool RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(FILES ${pages}/moesaic.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
install(FILES ${pages}/moesaic DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
install(FILES ${pages}/_moesaic DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/vendor-completions)

# scripts/debian-package runs it
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME moesaic)
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_PACKAGE_CONTACT "moesaic developers <moesaic@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "fine-tuning of mixture-of-experts language models on CPUs")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS "python3-venv")
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "libstarpu-dev")
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA ${PROJECT_SOURCE_DIR}/cmake/triggers)
include(CPack)
