set(ISA_FLAGS -mavx2 -mfma -mf16c)
