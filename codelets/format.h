/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quantised weight formats: what a code means, how checkpoints store codes and scales, and how
 * floats become codes. One file each in codelets/formats/; nothing else knows a format by name.
 *
 * A weight is (values[code] - zero) * scale, in f32. One scale (and one zero, where there are
 * zeros) serves `rows` rows times `group` columns. Kernels see codes and scales only in the packed
 * form of codelets/kernels/packed/coded.h, which is the same for all formats of equally many bits.
 */
#ifndef MOE_CODELETS_FORMAT_H
#define MOE_CODELETS_FORMAT_H

#include "engine/base.h"

/* What decoders may assume of a format's values, beside the table itself. */
enum moe_codes {
	MOE_CODES_TABLE,	  /* nothing */
	MOE_CODES_INTEGER,	  /* 8 bits: two's complement integers */
	MOE_CODES_SIGN_MAGNITUDE, /* 8 bits: values[128 + i] = -values[i] */
};

#define MOE_SCALE_UE8M0 MOE_U8 /* as a scale's dtype: 2^(byte - 127) */

/*
 * What a forward multiplies codes by: activations as bf16; as 15-bit integers in two planes of 8 bits (errors below
 * those of bf16) where there are few rows, else as bf16; as 8-bit integers. Integers have a scale per row and 32 or
 * 64 columns (packed/ints.h).
 */
enum moe_compute {
	MOE_COMPUTE_DEFAULT, /* the format's, or what MOESAIC_COMPUTE names */
	MOE_COMPUTE_BF16,
	MOE_COMPUTE_INT16,
	MOE_COMPUTE_INT8,
};

struct moe_format;

/* How a weight is coded in memory. */
struct moe_coding {
	const struct moe_format *format; /* NULL: plain values */
	enum moe_dtype scale;		 /* F32, BF16, F16 or MOE_SCALE_UE8M0 */
	bool zero;			 /* there are zeros, 8-bit integers */
	int64_t group;			 /* columns per scale, at least 1 */
	int64_t phase; /* columns of the first group that belong to what lies left of this weight */
	enum moe_compute compute;
	int64_t rows; /* that share a scale, at least 1 */
};

struct moe_quantised;

/* Reads what is stored; row, k0 and group are those of the whole matrix. */
struct moe_code_reader {
	void (*codes)(const struct moe_quantised *q, int64_t row, int64_t k0, int64_t k,
		      uint8_t *codes);
	float (*scale)(const struct moe_quantised *q, int64_t row, int64_t group);
	int (*zero)(const struct moe_quantised *q, int64_t row, int64_t group); /* or NULL */
};

/* One matrix [n, k] as a file holds it, or as moe_quantise leaves it. Data may be unaligned. */
struct moe_quantised {
	struct moe_coding coding; /* phase 0 */
	const struct moe_code_reader *reader;
	int64_t n, k;
	struct moe_array codes, scale, zero;
	const struct moe_code_writer *writer; /* of the layout that it is stored in; NULL: none */
};

/* The tensors of one matrix: what moe_format_layout.open checks. data NULL: absent. */
struct moe_stored {
	const char *codes_name, *scale_name, *zero_name;
	struct moe_array codes, scale, zero;
	int64_t n, k;	       /* that the model expects */
	struct moe_array more; /* written only: what other readers want beside these */
};

/* Writes a matrix as a layout has it. */
struct moe_code_writer {
	/*
	 * Dtypes and shapes of the tensors (ndim 0: there is none) of a matrix with q's n, k and
	 * coding; its data are not looked at. MOE_ERR_UNSUPPORTED: it cannot be stored so.
	 */
	enum moe_status (*shapes)(const struct moe_quantised *q, struct moe_stored *s);
	/* Fills in the data of s, which has these shapes. MOE_ERR_UNSUPPORTED: a value does not fit. */
	enum moe_status (*store)(const struct moe_quantised *q, const struct moe_stored *s);
};

/*
 * One way in which checkpoints store a format: tensors named by a suffix that replaces ".weight" of
 * the plain name (or follows names that don't end so).
 */
struct moe_format_layout {
	const char *codes, *scale,
		*zero; /* suffixes; zero NULL: none. A zero tensor may be absent. */
	enum moe_dtype codes_dtype;
	const char *more; /* suffix of a tensor that is only written; or NULL */
	/* The matrix's size, by its tensors; false: theirs are not of this layout. */
	bool (*size)(const struct moe_array *codes, const struct moe_array *scale, int64_t *n,
		     int64_t *k);
	const char *name; /* of convert's --weights where it is not the format's; or NULL */
	const struct moe_code_writer *writer; /* NULL: read only */
	/* fills in *q but for the data pointers, and q->writer where this layout's is another's that has the same names;
	 * MOE_ERR_FORMAT, MOE_ERR_UNSUPPORTED name the tensor */
	enum moe_status (*open)(const struct moe_stored *s, struct moe_quantised *q);
};

#define MOE_FORMAT_LAYOUTS 6

struct moe_format {
	const char *name; /* of --weights, info and docs */
	int bits;	  /* 4 or 8 */
	enum moe_codes codes;
	const float *values; /* [1 << bits] */
	/* For quantising: rows and columns that share a scale (0: a whole row) and the scale's
	 * dtype */
	int rows, group;
	enum moe_dtype scale;
	/* the fastest whose errors are those that docs/formats.md asks for; DEFAULT: BF16 */
	enum moe_compute compute;
	/*
	 * Codes of a block x [n, k], rows ld apart, and its scale, representable in the format's
	 * dtype. Rows of codes are ld_codes apart. x is finite. NULL: cannot be made from floats.
	 */
	float (*quantise)(int64_t n, int64_t k, const float *x, int64_t ld, uint8_t *codes,
			  int64_t ld_codes);
	/* The same at a given scale, above 0. */
	void (*encode)(int64_t n, int64_t k, const float *x, int64_t ld, float scale, uint8_t *codes,
		       int64_t ld_codes);
	/* quantise for formats with zeros: a group of one row, its scale and its zero. */
	float (*quantise_zero)(int64_t k, const float *x, uint8_t *codes, int8_t *zero);
	struct moe_format_layout layout[MOE_FORMAT_LAYOUTS]; /* ends with codes NULL */
};

/*
 * What quantisers do for every weight, in vectors: each has the bits of the plain C that stands for it in format.c and
 * formats/. x is finite, rows ld apart.
 */
struct moe_coders {
	uint32_t (*largest)(int64_t n, int64_t k, const float *x, int64_t ld); /* magnitude, as bits; any x */
	void (*range)(int64_t k, const float *x, float *least, float *largest); /* with 0 in it */
	/* x / scale, rounded, within least..most, plus add */
	void (*integers)(int64_t k, const float *x, float scale, int least, int most, int add, uint8_t *codes);
	void (*e4m3)(int64_t k, const float *x, float scale, uint8_t *codes);
	void (*e2m1)(int64_t k, const float *x, float scale, uint8_t *codes);
};

/* Those of the process; NULL: plain C. moe_kernels_select chooses a table's. */
void moe_coders_use(const struct moe_coders *c);
const struct moe_coders *moe_coders(void);

extern const struct moe_format *const moe_format_list[];
/* NULL if there is none of that name. */
const struct moe_format *moe_format_find(const char *name);

/*
 * MOESAIC_COMPUTE (int16 and int8 where a format and a table have them), else the format's own. MOE_ERR_CONFIG:
 * it names something else.
 */
enum moe_status moe_compute_check(void);
enum moe_compute moe_format_compute(const struct moe_format *f);

static inline int64_t moe_groups(const struct moe_coding *c, int64_t k)
{
	return k > 0 ? (c->phase + k + c->group - 1) / c->group : 0;
}

/*
 * Memory that was made for one takes weights of the other; trained: and they are quantised again in the same blocks.
 * phase and compute follow from where a weight lies.
 */
static inline bool moe_coding_alike(const struct moe_coding *a, const struct moe_coding *b, bool trained)
{
	return a->format == b->format && a->group == b->group && a->scale == b->scale && a->zero == b->zero &&
	       (!trained || a->rows == b->rows);
}

/* Bytes of one scale with its zero. */
static inline size_t moe_scale_bytes(const struct moe_coding *c)
{
	return moe_dtype_size(c->scale) + (c->zero ? 1 : 0);
}

/* The largest magnitude of x [n, k], rows ld apart. */
float moe_largest(int64_t n, int64_t k, const float *x, int64_t ld);
float moe_ue8m0(uint8_t v); /* NaN for 255 */
/* A stored scale as f32. */
float moe_scale_at(const void *scale, enum moe_dtype dtype, int64_t i);
/* The reverse, exact for values that came from that dtype. */
void moe_scale_put(void *scale, enum moe_dtype dtype, int64_t i, float v);
/*
 * A block x [n, k] (rows ld apart) of one scale, as moe_quantise_as makes it: codes, ld_codes apart, the scale that
 * the coding's dtype holds, *zero where there are zeros (then n is 1). A value that is not finite, or a scale beyond
 * the dtype, makes a scale that is not finite.
 */
float moe_quantise_block(const struct moe_coding *c, int64_t n, int64_t k, const float *x, int64_t ld,
			 uint8_t *codes, int64_t ld_codes, int8_t *zero);
/* The coding that moe_quantise gives a matrix of k columns. */
struct moe_coding moe_format_coding(const struct moe_format *f, int64_t k);

/*
 * Quantises x [n, k] (rows ld apart) of a float dtype. *q points into *memory, which the caller
 * frees with moe_free. MOE_ERR_FORMAT: a value is not finite. MOE_ERR_NOMEM.
 */
enum moe_status moe_quantise(const struct moe_format *f, const void *x, enum moe_dtype dtype,
			     int64_t n, int64_t k, int64_t ld, struct moe_quantised *q,
			     void **memory);
/*
 * The same in the coding, n and k of *q, which are the caller's; scales and zeros
 * are rounded to what the coding holds.
 */
enum moe_status moe_quantise_as(const void *x, enum moe_dtype dtype, int64_t ld,
				struct moe_quantised *q, void **memory);
/*
 * Rows row0, row0 + step, ... of `from`, n = q->n of them, as moe_quantise leaves a matrix; *q gives
 * the coding, as above, whose group and rows are those of `from`.
 */
enum moe_status moe_quantised_copy(const struct moe_quantised *from, int64_t row0, int64_t step,
				   struct moe_quantised *q, void **memory);
/* One row as f32, columns k0..k0+k: exact, what everything else is checked against. */
void moe_dequantise_row(const struct moe_quantised *q, int64_t row, int64_t k0, int64_t k,
			float *dst);
/*
 * NaN or infinite scales: MOE_ERR_FORMAT naming the tensor and the place. Values of codes are not
 * looked at: a format may have a NaN.
 */
enum moe_status moe_check_scales(const struct moe_quantised *q, const char *name);

/* For moe_format_layout.open: "name has dtype A; B is expected", "name has shape A; B is expected".
 */
enum moe_status moe_stored_dtype(const char *name, const struct moe_array *a, enum moe_dtype want);
enum moe_status moe_stored_shape(const char *name, const struct moe_array *a, int64_t rows,
				 int64_t cols);
/* F32, BF16 or F16 */
enum moe_status moe_stored_scale(const char *name, const struct moe_array *a);
/* The group that makes `groups` of k columns. MOE_ERR_FORMAT names the scale if none does. */
enum moe_status moe_stored_group(const char *name, int64_t k, int64_t groups, int64_t *group);

/* For moe_code_writer: "a [n, k] weight ... " where columns or rows are no multiple of `by`. */
enum moe_status moe_stored_multiple(const struct moe_quantised *q, int64_t rows_by, int64_t by);
/* An array's dtype and shape; its data stay. */
void moe_stored_set(struct moe_array *a, enum moe_dtype dtype, int64_t rows, int64_t cols);
/* scale [ceil(n / rows), groups], row-major. */
void moe_store_scales(const struct moe_quantised *q, const struct moe_array *scale);
/* moe_code_writer.store and moe_format_layout.size of codes that are a byte each, [n, k], with a scale tensor. */
enum moe_status moe_store_byte_codes(const struct moe_quantised *q, const struct moe_stored *s);
bool moe_size_of_byte_codes(const struct moe_array *codes, const struct moe_array *scale, int64_t *n, int64_t *k);

/* Readers that several formats share. */
uint8_t moe_stored_byte(const struct moe_array *a, int64_t at);
uint32_t moe_stored_u32(const struct moe_array *a, int64_t at);
/* scale [ceil(n / rows), groups], row-major */
float moe_stored_scale_at(const struct moe_quantised *q, int64_t row, int64_t group);

#endif
