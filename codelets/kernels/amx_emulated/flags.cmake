# The sources of amx over tiles in plain C: the tests' only way to run them on most machines.
set(ISA_FLAGS -DMOE_AMX_EMULATED)
set(ISA_TESTS_ONLY ON)
set(ISA_SHARED_SOURCES codelets/kernels/amx/gemm.c codelets/kernels/amx/grad.c codelets/kernels/amx/ints.c
	codelets/kernels/amx/panels.c codelets/kernels/amx/tiles.c)
