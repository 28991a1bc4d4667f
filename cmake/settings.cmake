# Language level, warnings and sanitizers for every target.
set(CMAKE_C_STANDARD 11)
set(CMAKE_C_EXTENSIONS ON) # StarPU's headers need gnu11
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_C_VISIBILITY_PRESET hidden)
if(NOT CMAKE_BUILD_TYPE)
	set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_C_FLAGS_RELEASE "-O3 -g")
add_compile_options(-Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith
	-fno-math-errno -fno-trapping-math)
add_compile_definitions(_GNU_SOURCE)
include_directories(${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/include)
if(MOESAIC_WERROR)
	add_compile_options(-Werror)
endif()
if(MOESAIC_SANITIZE)
	# an undefined operation ends the test, as a bad address does
	add_compile_options(-fsanitize=${MOESAIC_SANITIZE} -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
	add_link_options(-fsanitize=${MOESAIC_SANITIZE})
endif()
