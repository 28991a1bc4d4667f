/* SPDX-License-Identifier: Apache-2.0 */
/* Folders of kt-kernel's files that convert writes, read back: forward and backward weights, for
 * any number of parts. */
#include "model/convert.h"
#include "model/quantised.h"
#include "tests/child.h"
#include "tests/model_check.h"

#include <math.h>

const char moe_suite_name[] = "kt_write";

enum { EXPERTS = 8, LAYERS = 4, SIZE = 128 }; /* the fixture: every matrix is [128, 128] */

static char out_dir[300];

static enum moe_status write_kt(const char *in, const char *weights, int parts, bool backward,
				struct moe_convert_model_result *r)
{
	struct moe_convert_model_params p = { .struct_size = sizeof p,
					      .in = in,
					      .out = out_dir,
					      .weights = weights,
					      .threads = 2,
					      .kt_parts = parts,
					      .kt_backward = backward };

	*r = (struct moe_convert_model_result){ .struct_size = sizeof *r };
	moe_tree_remove(out_dir);
	return moe_convert_model(&p, r);
}

/* What a row of codes of these k values gives, to the nearest. */
static void expect_row(int bits, int64_t k, const float *x, int64_t step, float *out)
{
	float largest = 0, most = bits == 8 ? 127 : 7, scale;

	for (int64_t i = 0; i < k; i++)
		largest = MOE_MAX(largest, fabsf(x[i * step]));
	scale = largest > 0 ? largest / most : 1;
	for (int64_t i = 0; i < k; i++)
		out[i] = nearbyintf(x[i * step] / scale) * scale;
}

/* Values of a matrix [SIZE, SIZE] in the folder, beside those of x; cuts: parts of its columns. */
static void check_matrix(const struct moe_safetensors *st, const char *name, int bits,
			 const float *x, bool transposed, int cuts)
{
	const struct moe_st_tensor *t = moe_safetensors_find(st, name);
	float want[SIZE], got[SIZE];
	struct moe_quantised q;
	int64_t width = SIZE / cuts;

	if (!CHECK(t != NULL) || !CHECK(t->shape[0] == SIZE && t->shape[1] == SIZE))
		return;
	q = moe_st_quantised_own(t);
	CHECK(q.coding.group == width);
	for (int64_t i = 0; i < SIZE; i++) {
		for (int64_t c = 0; c < SIZE; c += width)
			expect_row(bits, width, transposed ? x + c * SIZE + i : x + i * SIZE + c,
				   transposed ? SIZE : 1, want + c);
		moe_dequantise_row(&q, i, 0, SIZE, got);
		for (int64_t j = 0; j < SIZE; j++)
			CHECK(fabsf(got[j] - want[j]) <= 2e-7f * fabsf(want[j]));
	}
}

static void check_folder(int bits, int parts, bool backward)
{
	static const char *const names[3] = { "gate_proj", "up_proj", "down_proj" };
	struct moe_safetensors *plain, *st;
	float *x = malloc(SIZE * SIZE * sizeof *x);

	CHECK_OK(moe_safetensors_open(fixture("ckpt/qwen3moe"), &plain));
	if (!CHECK_OK(moe_safetensors_open(out_dir, &st))) {
		printf("  %s\n", moe_last_error());
		return;
	}
	CHECK(moe_safetensors_count(st) == (size_t)(LAYERS * EXPERTS * 3 * (1 + backward)));
	for (int i = 0; i < LAYERS * EXPERTS * 3; i++) {
		const struct moe_st_tensor *t;
		bool down = i % 3 == 2;
		char name[160];

		snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.%s.weight",
			 i / 3 / EXPERTS, i / 3 % EXPERTS, names[i % 3]);
		t = moe_safetensors_find(plain, name);
		moe_to_f32(x, t->data, t->dtype, SIZE * SIZE);
		check_matrix(st, name, bits, x, false, down ? parts : 1);
		strcat(name, "_backward");
		if (backward)
			check_matrix(st, name, bits, x, true, down ? 1 : parts);
		else
			CHECK(!moe_safetensors_find(st, name));
	}
	moe_safetensors_close(st);
	moe_safetensors_close(plain);
	free(x);
}

static void test_round_trip(void)
{
	static const struct {
		const char *weights;
		int bits, parts;
	} cases[] = { { "kt-int8", 8, 1 }, { "kt-int8", 8, 2 }, { "kt-int4", 4, 1 } };
	struct moe_convert_model_result r;

	snprintf(out_dir, sizeof out_dir, "%s/kt", moe_test_dir());
	for (size_t i = 0; i < MOE_COUNT(cases); i++)
		for (int backward = 0; backward <= 1; backward++) {
			int64_t one = SIZE * SIZE * cases[i].bits / 8,
				scales = SIZE * (int64_t)sizeof(float);
			int64_t three = 3 * one + (2 + cases[i].parts) *
							  scales; /* parts of down share no scale */
			int64_t other =
				3 * one + (2 * cases[i].parts + 1) *
						  scales; /* nor do those of the others turned */

			if (!CHECK_OK(write_kt(fixture("ckpt/qwen3moe"), cases[i].weights,
					       cases[i].parts, backward, &r)))
				printf("  %s\n", moe_last_error());
			CHECK(r.converted == LAYERS * EXPERTS * 3 && r.kept == 0 &&
			      r.shards == LAYERS);
			CHECK(r.bytes == LAYERS * EXPERTS * (three + backward * other));
			CHECK(r.error > 0 && r.error < (cases[i].bits == 8 ? .01 : .2));
			check_folder(cases[i].bits, cases[i].parts, backward);
		}
}

/* Codes that kt's files can hold are taken over: their own, and int8 with a scale per row. */
static void test_kept(void)
{
	struct moe_convert_model_params p = { .struct_size = sizeof p, .threads = 2 };
	struct moe_convert_model_result r = { .struct_size = sizeof r };
	char again[300];

	snprintf(out_dir, sizeof out_dir, "%s/kt", moe_test_dir());
	snprintf(again, sizeof again, "%s/again", moe_test_dir());
	CHECK_OK(write_kt(fixture("ckpt/qwen3moe"), "kt-int8", 2, true, &r));
	p.in = fixture("ckpt/qwen3moe");
	p.out = again;
	p.kt_weights = out_dir;
	p.weights = "kt-int8";
	p.kt_parts = 2;
	moe_tree_remove(again);
	if (!CHECK_OK(moe_convert_model(&p, &r)))
		printf("  %s\n", moe_last_error());
	CHECK(r.kept == LAYERS * EXPERTS * 3 && r.error == 0);
	p.kt_parts = 1; /* down has a scale for each of its parts: one for both is another */
	moe_tree_remove(again);
	CHECK_OK(moe_convert_model(&p, &r));
	CHECK(r.kept == LAYERS * EXPERTS * 2 && r.error > 0 && r.error < .01);
}

/* ---- refused ---- */

static void test_errors(void)
{
	const char *in = fixture("ckpt/qwen3moe");
	struct moe_convert_model_result r;
	struct moe_safetensors *st;
	char path[600];

	snprintf(out_dir, sizeof out_dir, "%s/kt", moe_test_dir());
	CHECK_ERROR(write_kt(in, "kt-int4", 2, false, &r), MOE_ERR_UNSUPPORTED,
		    "a part of down would be [128, 64]");
	CHECK_ERROR(write_kt(in, "kt-int8", 3, false, &r), MOE_ERR_ARG,
		    "128 rows of gate cannot be cut into 3 parts");
	CHECK_ERROR(write_kt(in, "kt-int8", 65, false, &r), MOE_ERR_ARG, "kt_parts 65");
	CHECK_ERROR(write_kt(in, "int8", 2, false, &r), MOE_ERR_ARG,
		    "kt_parts and kt_backward are for");
	CHECK(!moe_path_exists(out_dir));

	/* Backward weights that are not what was written: by name, though nothing here needs them.
	 */
	CHECK_OK(write_kt(in, "kt-int8", 2, true, &r));
	snprintf(path, sizeof path, "%s/_layer_2/_numa_1/INT8_up_bwd_5_8192Byte_quant_.kt",
		 out_dir);
	CHECK_OK(moe_file_write(path, "short", 5));
	CHECK_ERROR(moe_safetensors_open(out_dir, &st), MOE_ERR_FORMAT,
		    "INT8_up_bwd_5_8192Byte_quant_.kt: has 5 bytes");
	CHECK(remove(path) == 0);
	CHECK_ERROR(moe_safetensors_open(out_dir, &st), MOE_ERR_FORMAT,
		    "INT8_up_bwd_5_8192Byte_quant_.kt: is missing");
}

const struct moe_test moe_suite_tests[] = {
	{ "what is written is read back, backward weights too", test_round_trip },
	{ "codes that fit are taken over", test_kept },
	{ "what is refused, by name", test_errors },
	{ NULL, NULL },
};
