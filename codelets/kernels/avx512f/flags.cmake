set(ISA_FLAGS -mavx512f -mavx512bw -mavx512dq -mavx512vl)
