/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Values of gate and up within .01 of where a file's SwiGLU cuts them: rounding decides whether they have a gradient.
 * The error that one of them makes is a multiple of a known direction, which is taken out of what is compared.
 */
#ifndef MOE_TESTS_LAYER_KINKS_H
#define MOE_TESTS_LAYER_KINKS_H

#include "tests/layer_file.h"

#define KINK_DISTANCE .01
#define KINK_RANK 64

struct kink {
	int64_t expert, row;
	const float *x, *b; /* [H] with the column of ones, [r] */
	double u[KINK_RANK]; /* A x */
};

/* Whether row `row` of gate (0) or up (1) is one. */
static bool kink_at(const struct file *f, int up, int64_t slot, int64_t row, struct kink *k)
{
	const struct block_data *d = &f->d;
	const struct block_case *c = &d->c;
	int64_t e = k->expert = d->ids[slot];
	const float *w = d->w[MOE_BLOCK_GATE_PROJ + up] + (e * c->I + row) * c->H;
	const float *a = d->w[MOE_BLOCK_GATE_LORA_A + up] + e * c->r * c->H;
	double sum = 0;

	k->row = row;
	k->x = d->x + slot / c->k * c->H;
	k->b = d->w[MOE_BLOCK_GATE_LORA_B + up] + (e * c->I + row) * c->r;
	for (int i = 0; i < c->H; i++)
		sum += (double)w[i] * (double)k->x[i];
	for (int j = 0; j < c->r; j++) {
		k->u[j] = 0;
		for (int i = 0; i < c->H; i++)
			k->u[j] += (double)a[j * c->H + i] * (double)k->x[i];
		sum += f->alpha / c->r * (double)k->b[j] * k->u[j];
	}
	return fabs((up ? fabs(sum) : sum) - (double)c->limit) < KINK_DISTANCE;
}

/* got - want loses its part along n elements from `at` on */
static void kink_remove(double *got, const double *want, int64_t at, const double *direction, int64_t n)
{
	double dot = 0, square = 0;

	for (int64_t i = 0; i < n; i++) {
		dot += (got[at + i] - want[at + i]) * direction[i];
		square += direction[i] * direction[i];
	}
	for (int64_t i = 0; i < n && square > 0; i++)
		got[at + i] -= dot / square * direction[i];
}

/* One kink's direction in gate's or up's weights, A, B, or (which -1) bias. H: of the file */
static void kink_exclude(const struct file *f, int which, const struct kink *k, int64_t H, double *got,
			 const double *want)
{
	const struct block_case *c = &f->d.c;
	int64_t at = k->expert * c->I + k->row, n = 0;
	double *dir = malloc((size_t)((H + 1) * (c->r + 1)) * sizeof *dir);

	if (which < 0) {
		dir[n++] = 1;
	} else if (which <= MOE_BLOCK_UP_PROJ) {
		at *= H;
		for (; n < H; n++)
			dir[n] = (double)k->x[n];
	} else if (which <= MOE_BLOCK_UP_LORA_A) {
		at = k->expert * c->r * H;
		for (; n < c->r * H; n++)
			dir[n] = (double)k->b[n / H] * (double)k->x[n % H];
	} else {
		at *= c->r;
		for (; n < c->r; n++)
			dir[n] = k->u[n];
	}
	kink_remove(got, want, at, dir, n);
	free(dir);
}

/*
 * For an array of gate (up 0) or up (1); which: a block array, or -1 for the bias. Directions are not orthogonal: a
 * few rounds.
 */
static void exclude_kinks(const struct file *f, int up, int which, double *got, const double *want)
{
	const struct block_case *c = &f->d.c;

	if (c->limit == 0 || !table_is_packed() || c->r > KINK_RANK)
		return;
	for (int round = 0; round < 4; round++)
		for (int64_t slot = 0; slot < c->T * c->k; slot++)
			for (int64_t row = 0; row < c->I; row++) {
				struct kink k;

				if (f->d.ids[slot] >= 0 && kink_at(f, up, slot, row, &k))
					kink_exclude(f, which, &k, c->H - f->biased, got, want);
			}
}

#endif
