set(ISA_FLAGS -mamx-tile -mamx-bf16 -mamx-int8 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mfma -mtune=sapphirerapids)
