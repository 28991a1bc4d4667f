/* SPDX-License-Identifier: Apache-2.0 */
/* A block fixture's calls on the experts of one layer, in every activation policy, by sync and
 * async calls. */
#ifndef MOE_TESTS_LAYER_WAYS_H
#define MOE_TESTS_LAYER_WAYS_H

#include "tests/layer_file.h"

struct way {
	enum moe_activations activations;
	bool async;
};

static inline struct way way_at(int i) /* of four */
{
	return (struct way){ i & 1 ? MOE_ACTIVATIONS_RECOMPUTE : MOE_ACTIVATIONS_RETAIN,
			     (i & 2) != 0 };
}

/* Not loaded yet; NULL where it cannot be made. */
static inline struct moe_expert_layer *way_create(struct moe_engine *e, const struct file *f, struct way w, bool lora,
						  bool train_base)
{
	struct moe_experts_params p = layer_params(&f->d.c);
	struct moe_expert_layer *l = NULL;

	p.lora_rank = lora ? f->d.c.r : 0;
	p.lora_alpha = (float)f->alpha;
	p.train_base = train_base;
	p.activations = w.activations;
	p.weight_format = f->format;
	CHECK_OK(moe_experts_create(e, &p, &l));
	return l;
}

static inline bool way_forward(struct moe_expert_layer *l, struct file *f, struct way w, bool save)
{
	struct layer_call a = layer_call(&f->d, f->d.c.T);
	bool good = CHECK_OK((w.async ? moe_experts_forward_async : moe_experts_forward)(
		l, &a.x, &a.ids, &a.weights, save, &a.out));

	return good && (!w.async || CHECK_OK(moe_experts_wait(l)));
}

static inline bool way_backward(struct moe_expert_layer *l, struct file *f, struct way w)
{
	struct layer_call a = layer_call(&f->d, f->d.c.T);
	bool good = CHECK_OK((w.async ? moe_experts_backward_async : moe_experts_backward)(
		l, &a.grad_out, 1, &a.grad_x, &a.grad_weights));

	return good && (!w.async || CHECK_OK(moe_experts_wait(l)));
}

/* got against a key of the file; 0 where both are */
static inline void compare(const struct file *f, const char *key, const double *got, int64_t n,
			   double bound)
{
	double *want = doubles(f->st, key), error;

	if (!want)
		return;
	error = relative_error(got, want, n);
	if (!CHECK(error <= bound || (error < 1e-6 && bound > 0)))
		printf("  %s, %s: %.2e, %.2e allowed\n", f->name, key, error, bound);
	free(want);
}

/* more: added to it, or NULL */
static inline void compare_floats(const struct file *f, const char *key, const float *got,
				  const double *more, int64_t n, double bound)
{
	double *g = doubles_of(got, n);

	for (int64_t i = 0; more && i < n; i++)
		g[i] += more[i];
	compare(f, key, g, n, bound);
	free(g);
}

/* The last forward's output as the file has it; free it. */
static inline double *way_output(const struct file *f)
{
	const struct block_case *c = &f->d.c;
	int64_t H = c->H - f->biased, n = c->T * H;
	double *out = doubles_of(f->d.out, c->T * c->H);

	if (f->biased)
		narrow(out, (struct widening){ c->T, H, 1 }, NULL);
	for (int64_t i = 0; f->more_out && i < n; i++)
		out[i] += f->more_out[i];
	return out;
}

/* The mean square of output minus target, whose gradient becomes grad_out. */
static inline double way_loss(struct file *f, const double *target)
{
	int64_t T = f->d.c.T, H = f->d.c.H - f->biased, n = T * H;
	double *out = way_output(f), loss = 0;

	for (int64_t i = 0; i < n; i++) {
		double diff = out[i] - target[i];

		loss += diff * diff / (double)n;
		f->d.grad_out[i / H * f->d.c.H + i % H] = (float)(2 * diff / (double)n);
	}
	free(out);
	return loss;
}

static inline struct moe_adamw_params way_adamw(const struct file *f)
{
	return (struct moe_adamw_params){ .struct_size = sizeof(struct moe_adamw_params),
					  .learning_rate = f->lr,
					  .beta1 = f->beta1,
					  .beta2 = f->beta2,
					  .eps = f->eps,
					  .weight_decay = f->decay };
}

/* After five steps: ||p5 - ref5|| / ||ref5 - p0||. got and start [n] lose the columns that biases
 * added, if it has some. */
static inline void compare_way(const struct file *f, const char *name, double *got,
			       const float *start, int64_t n, struct widening w, double bound)
{
	double *from = doubles_of(start, n), *want, off = 0, way = 0;
	char key[64];

	snprintf(key, sizeof key, "step5.%s", name);
	want = doubles(f->st, key);
	if (f->biased) {
		narrow(got, w, NULL);
		narrow(from, w, NULL);
		n -= w.blocks * w.more;
	}
	for (int64_t j = 0; want && j < n; j++) {
		off += (got[j] - want[j]) * (got[j] - want[j]);
		way += (want[j] - from[j]) * (want[j] - from[j]);
	}
	if (!CHECK(want && way > 0 && sqrt(off) <= bound * sqrt(way)))
		printf("  %s, %s: %.2e of its way\n", f->name, key, sqrt(off / way));
	free(from), free(want);
}

#endif
