/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Transposed copies: the kernels that make them, blocks and models that multiply by them, what they
 * take, the order of the tasks that fill them, and packing again after an update.
 */
#include "api/block.h"
#include "codelets/update.h"
#include "tests/block_check.h"
#include "tests/machine_check.h"

#include <math.h>

const char moe_suite_name[] = "repack";

static const char *const modes[] = { "direct", "shared:1", "resident" };

static bool has_copies(const struct moe_kernels *k)
{
	return k->supported() && k->weight_transpose && moe_kernels_enable(k) == MOE_OK;
}

static uint64_t random_state = 1;

static double uniform(void) /* [-1, 1) */
{
	return uniform_of(&random_state);
}

static float *randoms(int64_t n)
{
	float *p = malloc((size_t)(n + 1) * sizeof *p);

	for (int64_t i = 0; i < n; i++)
		p[i] = (float)uniform();
	return p;
}

static float *transposed(const float *src, int64_t n, int64_t k)
{
	float *p = malloc((size_t)(n * k + 1) * sizeof *p);

	for (int64_t i = 0; i < n * k; i++)
		p[i % k * n + i / k] = src[i];
	return p;
}

static void *bytes_of(size_t n, int value)
{
	void *p = aligned_alloc(64, (n + 127) / 64 * 64);

	memset(p, value, n);
	return p;
}

/* ---- kernels ---- */

/* Packed and transposed is what packing the transposed source gives, with its padding. */
static void check_weight(const struct moe_kernels *k, int64_t n, int64_t cols)
{
	float *src = randoms(n * cols), *src_t = transposed(src, n, cols);
	size_t bytes = k->weight_bytes(MOE_F32, cols, n, MOE_USE_GEMM);
	struct moe_weight W = { .data = bytes_of(k->weight_bytes(MOE_F32, n, cols, MOE_USE_GEMM),
						 0xff) };
	struct moe_weight want = { .data = bytes_of(bytes, 0xff) };
	void *got = bytes_of(bytes, 0xff);

	k->weight_pack(&W, src, MOE_F32, n, cols, cols, MOE_USE_GEMM);
	k->weight_pack(&want, src_t, MOE_F32, cols, n, n, MOE_USE_GEMM);
	k->weight_transpose(&W, got);
	if (!CHECK(!memcmp(got, want.data, bytes)))
		printf("  %s [%lld, %lld]\n", k->name, (long long)n, (long long)cols);
	free(src), free(src_t), free(W.data), free(want.data), free(got);
}

/* The same for A and B, by pieces of rows as an update packs them. */
static void check_lora(const struct moe_kernels *k, enum moe_lora_side side, int64_t n,
		       int64_t cols)
{
	enum moe_lora_side other = side == MOE_LORA_A ? MOE_LORA_B : MOE_LORA_A;
	float *src = randoms(n * cols), *src_t = transposed(src, n, cols);
	size_t bytes = k->lora_bytes(other, cols, n);
	void *got = bytes_of(bytes, 0), *want = bytes_of(bytes, 0);

	for (int64_t n0 = 0; n0 < n; n0 += 48)
		k->lora_pack_t(side, src, n, cols, n0, n0 + 48, .75f, got);
	k->lora_pack(other, src_t, cols, n, 0, cols, .75f, want);
	if (!CHECK(!memcmp(got, want, bytes)))
		printf("  %s LoRA %d [%lld, %lld]\n", k->name, side, (long long)n, (long long)cols);
	free(src), free(src_t), free(got), free(want);
}

/* Panels that an update packs anew, in pieces of 48 rows, are what packing the new values gives; those of large weights
 * are written past the caches. */
static void check_renewed(const struct moe_kernels *k, int64_t n, int64_t cols)
{
	static const float special[] = { INFINITY, -INFINITY, NAN, -0.f, 3.4028235e38f, 0x1.01p0f, 0x1.03p0f };
	float *old = randoms(n * cols), *src = randoms(n * cols);
	size_t bytes = k->weight_bytes(MOE_F32, n, cols, MOE_USE_GEMM);
	struct moe_weight W = { .data = bytes_of(bytes, 0) }, want = { .data = bytes_of(bytes, 0) };

	for (int64_t i = 0; i < n * cols; i += 89)
		src[i] = special[i % (int64_t)MOE_COUNT(special)];
	k->weight_pack(&W, old, MOE_F32, n, cols, cols, MOE_USE_GEMM);
	k->weight_pack(&want, src, MOE_F32, n, cols, cols, MOE_USE_GEMM);
	CHECK(n * cols == 1 || memcmp(W.data, want.data, bytes));
	for (int64_t n0 = 0; n0 < n; n0 += 48)
		k->weight_repack(&W, src + n0 * cols, n0, MOE_MIN(n0 + 48, n));
	if (!CHECK(!memcmp(W.data, want.data, bytes)))
		printf("  %s renewed [%lld, %lld]\n", k->name, (long long)n, (long long)cols);
	free(old), free(src), free(W.data), free(want.data);
}

static void renewed(void)
{
	static const int64_t shapes[][2] = { { 1, 1 },	    { 33, 5 },	   { 48, 64 },	 { 257, 90 },
					     { 257, 1088 }, { 512, 544 }, { 300, 1000 }, { 64, 8192 } };

	for (int i = 0; moe_kernels_list[i]; i++) {
		const struct moe_kernels *k = moe_kernels_list[i];

		if (!k->supported() || moe_kernels_enable(k) != MOE_OK)
			continue;
		for (size_t s = 0; s < MOE_COUNT(shapes); s++)
			check_renewed(k, shapes[s][0], shapes[s][1]);
	}
}

static void kernels(void)
{
	static const int64_t shapes[][2] = { { 1, 1 },	 { 16, 16 },  { 33, 5 },   { 5, 33 },
					     { 48, 64 }, { 257, 90 }, { 320, 600 } };

	for (int i = 0; moe_kernels_list[i]; i++) {
		const struct moe_kernels *k = moe_kernels_list[i];

		CHECK(!k->weight_transpose == !k->lora_pack_t);
		if (!has_copies(k))
			continue;
		for (size_t s = 0; s < MOE_COUNT(shapes); s++)
			check_weight(k, shapes[s][0], shapes[s][1]);
		check_lora(k, MOE_LORA_A, 5, 77);
		check_lora(k, MOE_LORA_A, 40, 600);
		check_lora(k, MOE_LORA_B, 77, 5);
		check_lora(k, MOE_LORA_B, 300, 16);
	}
}

/* ---- blocks ---- */

static struct block_case a_case(void)
{
	return (struct block_case){
		.E = 6, .k = 2, .H = 100, .I = 300, .T = 40, .r = 5, .seed = 3
	};
}

/* Everything that comes out of two steps with two backwards each. */
static uint64_t run_steps(struct moe_engine *e, const struct block_case *c, struct block_data *d)
{
	struct moe_block *b = block_make(e, c, d, NULL);
	uint64_t h = 1;

	for (int i = 0; i < 2; i++) {
		CHECK_OK(block_forward(b, d, true, d->out));
		CHECK_OK(block_backward(b, d));
		h = block_step(b, d, h);
	}
	moe_block_destroy(b);
	return h;
}

static void compare_modes(const struct moe_kernels *k)
{
	struct moe_engine *e = open_isa(k->name, 2, 1);
	struct block_case c = a_case();
	int64_t n = (int64_t)c.T * c.H;
	uint64_t bits[3];
	double *first = malloc((size_t)n * sizeof *first),
	       *other = malloc((size_t)n * sizeof *other);

	for (int base = 0; e && base < 2; base++) {
		struct block_data d;

		c.base_grads = base;
		block_data_make(&d, &c);
		for (int i = 0; i < 3; i++) {
			c.backward = modes[i];
			bits[i] = run_steps(e, &c, &d);
			for (int64_t j = 0; j < n; j++)
				(i ? other : first)[j] = d.grad_x[j];
			if (i)
				CHECK(relative_error(other, first, n) < 1e-2);
		}
		/* the ring and the resident copy hold the same */
		CHECK(bits[1] == bits[2]);
		block_data_free(&d);
	}
	free(first), free(other);
	CHECK_OK(moe_engine_close(e));
}

static void blocks(void)
{
	for (int i = 0; moe_kernels_list[i]; i++)
		if (has_copies(moe_kernels_list[i]))
			compare_modes(moe_kernels_list[i]);
}

/* Slots without an expert, experts without rows, a changing T, weights set anew: stale copies would
 * show. */
static void block_changes(void)
{
	struct moe_engine *e = open_isa("c", 2, 2);
	struct block_case c = a_case();
	uint64_t bits[3];

	c.routing = 2;
	c.share_a = true;
	for (int i = 0; i < 3; i++) {
		struct block_data d, short_d;
		struct moe_block *b;

		c.backward = modes[i];
		block_data_make(&d, &c);
		short_d = d;
		short_d.c.T = 3;
		b = block_make(e, &c, &d, NULL);
		bits[i] = block_step(b, &d, 1);
		bits[i] = block_step(b, &short_d, bits[i]);
		for (int64_t j = 0; j < d.n[MOE_BLOCK_UP_PROJ]; j++)
			d.w[MOE_BLOCK_UP_PROJ][j] *= -1;
		CHECK_OK(block_fill(b, &d));
		bits[i] = block_step(b, &d, bits[i]);
		moe_block_destroy(b);
		block_data_free(&d);
	}
	CHECK(bits[0] != bits[1] && bits[1] == bits[2]);
	CHECK_OK(moe_engine_close(e));
}

static void memory_and_info(void)
{
	struct moe_engine *e = open_isa("c", 2, 2);
	struct block_case c = a_case();
	struct moe_block_info info = { .struct_size = sizeof info };
	struct moe_block_params p;
	size_t bytes[3][2], direct = moe_memory_bytes(e, "weights", -1);
	struct moe_block *b;

	for (int i = 0; i < 3; i++) {
		c.backward = modes[i];
		p = block_params_of(&c);
		CHECK_OK(moe_block_create(e, &p, &b));
		CHECK_OK(moe_block_get_info(b, &info));
		CHECK(!strcmp(info.backward_weights, modes[i]) && info.groups == b->layer.G);
		CHECK(strchr(info.backward_costs, '*') != NULL);
		for (int part = 0; part < 2; part++) {
			size_t extra = i ? moe_transposed_bytes(&b->layer, MOE_F32, part) : 0;

			bytes[i][part] = moe_memory_bytes(e, "weights", part);
			CHECK(bytes[i][part] == bytes[0][part] + extra);
			CHECK(!i || extra > 2 * 3 * 6 * 150 * 100);
		}
		moe_block_destroy(b);
		CHECK(moe_memory_bytes(e, "weights", -1) == direct);
	}
	p.backward_weights = "shared:5";
	CHECK_OK(moe_block_create(e, &p, &b));
	CHECK_OK(moe_block_get_info(b, &info));
	CHECK(!strcmp(info.backward_weights, "shared:1"));
	moe_block_destroy(b);
	p.backward_weights = "shared:0";
	CHECK_ERROR(moe_block_create(e, &p, &b), MOE_ERR_CONFIG, "shared:0");
	info.struct_size = 1;
	CHECK_ERROR(moe_block_get_info(NULL, &info), MOE_ERR_ARG, "struct_size");
	CHECK_OK(moe_engine_close(e));
	e = open_isa("ref", 1, 1);
	p.backward_weights = "resident";
	CHECK_ERROR(moe_block_create(e, &p, &b), MOE_ERR_UNSUPPORTED, "resident");
	p.backward_weights = "auto";
	CHECK_OK(moe_block_create(e, &p, &b));
	moe_block_destroy(b);
	CHECK_OK(moe_engine_close(e));
}

/* A file that claims another machine makes another choice. */
static void falsified_child(const void *arg)
{
	static const struct {
		double backward, pack;
		const char *want;
	} claims[] = {
		{ 1, 10, "direct" },
		{ .3, 10, "resident" },
		{ .3, 1e-3, "resident" },
	};
	struct block_case c = { .E = 4, .k = 4, .H = 512, .I = 512, .T = 256 };
	struct moe_block_info info = { .struct_size = sizeof info };
	struct moe_engine *e = open_isa("c", 2, 1);
	struct moe_block *b;

	(void)arg;
	for (size_t i = 0; i < MOE_COUNT(claims); i++) {
		struct moe_machine_rates_file f = claimed("c", 1);
		struct moe_block_params p = block_params_of(&c);

		for (int j = 0; j < MOE_RATE_POINTS; j++)
			f.isa[0].gemm_gflops[MOE_GEMM_BACKWARD][j] =
				claims[i].backward * f.isa[0].gemm_gflops[MOE_GEMM_FORWARD][j];
		f.isa[0].pack_gbps = claims[i].pack;
		CHECK_OK(moe_machine_file_write(machine_path("m.json"), &f));
		setenv("MOESAIC_MACHINE", machine_path("m.json"), 1);
		CHECK_OK(moe_block_create(e, &p, &b));
		CHECK_OK(moe_block_get_info(b, &info));
		if (!CHECK(!strcmp(info.backward_weights, claims[i].want)))
			printf("  claim %zu: %s\n%s", i, info.backward_weights,
			       info.backward_costs);
		CHECK((b->layer.transposed != NULL) == !strcmp(claims[i].want, "resident"));
		moe_block_destroy(b);
	}
	CHECK_OK(moe_engine_close(e));
}

static void falsified(void)
{
	in_child("a falsified machine file", falsified_child, NULL);
}

/* ---- repack ---- */

static const float *master_of(float *const masters[3], const struct moe_experts *l, int part,
			      int which)
{
	return masters[which] + l->part[part].I * l->H * l->E * part;
}

/* Two layers of equal shape: one packed from the new values, one repacked from them by tasks. */
static void repack(void)
{
	struct moe_engine *e = open_isa("c", 2, 2);
	struct moe_experts_shape s = {
		.E = 5, .k = 2, .H = 50, .I = 80, .group_size = 2, .base_grads = true, .train_base = true,
		.backward = MOE_BACKWARD_RESIDENT
	};
	struct moe_experts a = { 0 }, b = { 0 };
	struct moe_context c = { .engine = e };
	struct moe_tensor *masters = NULL, *weights = NULL;
	float *old = randoms(80 * 50), *part[3];

	CHECK_OK(moe_kernels_select("c"));
	CHECK_OK(moe_experts_alloc(e, &s, MOE_F32, &a));
	CHECK_OK(moe_experts_alloc(e, &s, MOE_F32, &b));
	for (int i = 0; i < 3; i++)
		part[i] = randoms(2 * 5 * 40 * 50);
	for (int x = 0; x < s.E; x++)
		for (int i = 0; i < MOE_EXPERT_MATRICES; i++)
			moe_experts_pack(&a, (enum moe_expert_matrix)i, x, old, MOE_F32);
	for (int p = 0; p < 2; p++)
		for (int x = 0; x < s.E; x++) {
			struct moe_experts_part *bp = &b.part[p];
			int64_t at = (int64_t)x * 40 * 50;

			moe_kernels()->weight_pack(&bp->gate[x], master_of(part, &b, p, 0) + at,
						   MOE_F32, 40, 50, 50, MOE_USE_GEMM);
			moe_kernels()->weight_pack(&bp->up[x], master_of(part, &b, p, 1) + at,
						   MOE_F32, 40, 50, 50, MOE_USE_GEMM);
			moe_kernels()->weight_pack(&bp->down[x], master_of(part, &b, p, 2) + at,
						   MOE_F32, 50, 40, 40, MOE_USE_GEMM);
			for (int i = 0; i < MOE_EXPERT_MATRICES; i++)
				moe_expert_transpose(&b, b.transposed, p, x,
						     (enum moe_expert_matrix)i);
		}
	for (int p = 0; p < 2; p++)
		for (int i = 0; i < MOE_EXPERT_MATRICES; i++)
			memcpy(a.part[p].base[i].value, master_of(part, &a, p, i),
			       sizeof(float) * 5 * 40 * 50);
	CHECK_OK(moe_tensor_create(e, "masters", 0, -1, &masters));
	moe_tensor_set_initialised(masters);
	CHECK_OK(moe_tensor_create(e, "weights", 0, -1, &weights));
	CHECK_OK(moe_submit_begin(e));
	for (int i = 0; i < 2 * a.G; i++) {
		struct moe_repack_args args = { .layer = &a, .part = i / a.G, .group = i % a.G };

		CHECK_OK(moe_task_repack(&c, &args, masters, weights));
		args.group = a.G;
		CHECK_ERROR(moe_task_repack(&c, &args, masters, weights), MOE_ERR_ARG, "group");
	}
	moe_submit_end(e);
	CHECK_OK(moe_engine_wait(e));
	for (int p = 0; p < 2; p++) {
		size_t packed =
			(size_t)((char *)a.part[p].gate[1].data - (char *)a.part[p].gate[0].data);

		CHECK(!memcmp(a.part[p].gate[0].data, b.part[p].gate[0].data, 5 * packed));
		CHECK(!memcmp(a.transposed->part[p].data, b.transposed->part[p].data,
			      moe_transposed_bytes(&a, MOE_F32, p)));
	}
	moe_tensor_destroy(masters);
	moe_tensor_destroy(weights);
	moe_experts_free(e, &a);
	moe_experts_free(e, &b);
	free(old), free(part[0]), free(part[1]), free(part[2]);
	CHECK_OK(moe_engine_close(e));
}

/* ---- the operating system's permission ---- */

static int asked;

static bool refuse(void)
{
	asked++;
	return false;
}

static bool grant(void)
{
	asked++;
	return true;
}

static void permission(void)
{
	static const struct moe_kernels without = { .name = "plain" };
	static const struct moe_kernels yes = { .name = "granted", .enable = grant };
	static const struct moe_kernels no = { .name = "refused", .enable = refuse };

	CHECK_OK(moe_kernels_enable(&without));
	CHECK_OK(moe_kernels_enable(&yes));
	CHECK_OK(moe_kernels_enable(&yes));
	CHECK(asked == 1);
	CHECK_ERROR(moe_kernels_enable(&no), MOE_ERR_CONFIG, "MOESAIC_ISA");
	CHECK(strstr(moe_last_error(), "refused") != NULL);
	CHECK_ERROR(moe_kernels_enable(&no), MOE_ERR_CONFIG, "refused");
	CHECK(asked == 3);
	CHECK_ERROR(moe_engine_prepare("none"), MOE_ERR_CONFIG, "none");
}

const struct moe_test moe_suite_tests[] = {
	{ "kernels", kernels },
	{ "weights packed anew", renewed },
	{ "blocks in every mode", blocks },
	{ "blocks that change", block_changes },
	{ "memory, errors, what a block says", memory_and_info },
	{ "a falsified machine file", falsified },
	{ "repack of changed masters", repack },
	{ "permission of the operating system", permission },
	{ NULL, NULL },
};
