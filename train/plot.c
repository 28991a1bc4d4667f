/* SPDX-License-Identifier: Apache-2.0 */
#include "train/plot.h"
#include "engine/points.h"

#include "model/file.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>

enum { WIDTH = 720, HEIGHT = 400, LEFT = 60, RIGHT = 20, TOP = 36, BOTTOM = 46 };
#define SMOOTHING 0.9 /* of the running mean */

struct plot {
	char *text;
	size_t n, capacity;
	bool failed;
	double x0, x1, y0, y1;
};

static MOE_PRINTF(2, 3) void emit(struct plot *p, const char *fmt, ...)
{
	va_list ap;
	int need;

	va_start(ap, fmt);
	need = vsnprintf(NULL, 0, fmt, ap);
	va_end(ap);
	if (p->n + (size_t)need + 1 > p->capacity) {
		size_t want = 2 * (p->n + (size_t)need) + 4096;
		char *grown = moe_realloc(p->text, want, 1);

		if (!grown) {
			p->failed = true;
			return;
		}
		p->text = grown;
		p->capacity = want;
	}
	va_start(ap, fmt);
	p->n += (size_t)vsnprintf(p->text + p->n, p->capacity - p->n, fmt, ap);
	va_end(ap);
}

static double px(const struct plot *p, double x)
{
	return LEFT + (x - p->x0) / (p->x1 - p->x0) * (WIDTH - LEFT - RIGHT);
}

static double py(const struct plot *p, double y)
{
	return HEIGHT - BOTTOM - (y - p->y0) / (p->y1 - p->y0) * (HEIGHT - TOP - BOTTOM);
}

static void set_range(struct plot *p, const struct moe_train_log *log)
{
	p->x0 = p->y0 = INFINITY;
	p->x1 = p->y1 = -INFINITY;
	for (int64_t i = 0; i < log->n; i++) {
		const struct moe_train_event *e = &log->entry[i].event;
		double y = log->entry[i].eval ? e->eval_loss : e->loss;

		if (!isfinite(y))
			continue;
		p->x0 = fmin(p->x0, (double)e->step);
		p->x1 = fmax(p->x1, (double)e->step);
		p->y0 = fmin(p->y0, y);
		p->y1 = fmax(p->y1, y);
	}
	if (!(p->x0 <= p->x1))
		p->x0 = p->y0 = 0, p->x1 = p->y1 = 1;
	if (p->x1 - p->x0 < 1)
		p->x1 = p->x0 + 1;
	p->y1 += 0.05 * (p->y1 - p->y0) + 1e-3;
	p->y0 -= 0.05 * (p->y1 - p->y0) + 1e-3;
}

/* 1, 2 or 5 times a power of ten: about n intervals over a range */
static double tick_step(double range, int n)
{
	double raw = range / n, base = pow(10, floor(log10(raw))), f = raw / base;

	return base * (f < 1.5 ? 1 : f < 3.5 ? 2 : f < 7.5 ? 5 : 10);
}

static void axes(struct plot *p)
{
	double dy = tick_step(p->y1 - p->y0, 5), dx = fmax(1, tick_step(p->x1 - p->x0, 8));

	for (double y = ceil(p->y0 / dy) * dy; y <= p->y1; y += dy)
		emit(p,
		     "<line class=\"grid\" x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"/>"
		     "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%.4g</text>\n",
		     LEFT, WIDTH - RIGHT, py(p, y), py(p, y), LEFT - 8, py(p, y) + 4, y);
	for (double x = ceil(p->x0 / dx) * dx; x <= p->x1; x += dx)
		emit(p, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%.0f</text>\n", px(p, x),
		     HEIGHT - BOTTOM + 18, x);
	emit(p, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">step</text>\n",
	     (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8);
}

static void line(struct plot *p, const struct moe_train_log *log, const char *class, bool eval,
		 double keep)
{
	double mean = NAN;

	emit(p, "<polyline class=\"%s\" points=\"", class);
	for (int64_t i = 0; i < log->n; i++) {
		const struct moe_train_event *e = &log->entry[i].event;
		double y = eval ? e->eval_loss : e->loss;

		if (log->entry[i].eval != eval || !isfinite(y))
			continue;
		mean = isnan(mean) ? y : keep * mean + (1 - keep) * y;
		emit(p, "%.1f,%.1f ", px(p, (double)e->step), py(p, mean));
	}
	emit(p, "\"/>\n");
}

/* Whether there was one. */
static bool points(struct plot *p, const struct moe_train_log *log)
{
	bool any = false;

	for (int64_t i = 0; i < log->n; i++) {
		const struct moe_train_event *e = &log->entry[i].event;

		if (log->entry[i].eval && isfinite(e->eval_loss)) {
			emit(p, "<circle class=\"eval\" cx=\"%.1f\" cy=\"%.1f\" r=\"3\"/>\n",
			     px(p, (double)e->step), py(p, e->eval_loss));
			any = true;
		}
	}
	return any;
}

enum moe_status moe_train_plot(const struct moe_train_log *log)
{
	struct plot p = { 0 };
	char *path = moe_path_join(log->dir, "training_loss.svg");
	void *before = moe_points_enter();
	enum moe_status st;
	bool evaluated;

	set_range(&p, log);
	emit(&p,
	     "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" "
	     "font-family=\"sans-serif\" "
	     "font-size=\"12\">\n<style>.bg{fill:#fff}text{fill:#333}.grid{stroke:#ddd}polyline{"
	     "fill:none}"
	     ".raw{stroke:#9bc4f0}.mean{stroke:#1f6fc4;stroke-width:2}.eval{stroke:#d1495b;fill:#"
	     "d1495b}"
	     "polyline.eval{fill:none;stroke-width:2}@media(prefers-color-scheme:dark){.bg{fill:#"
	     "181a1b}"
	     "text{fill:#ccc}.grid{stroke:#333}.raw{stroke:#2f5d8a}.mean{stroke:#6db3f2}}</style>\n"
	     "<rect class=\"bg\" width=\"100%%\" height=\"100%%\"/>\n",
	     WIDTH, HEIGHT);
	axes(&p);
	line(&p, log, "raw", false, 0);
	line(&p, log, "mean", false, SMOOTHING);
	line(&p, log, "eval", true, 0);
	evaluated = points(&p, log);
	emit(&p,
	     "<text x=\"%d\" y=\"22\" font-size=\"14\">Training loss</text>"
	     "<text x=\"%d\" y=\"22\" text-anchor=\"end\">thin: each step, thick: running mean%s"
	     "</text>\n</svg>\n",
	     LEFT, WIDTH - RIGHT, evaluated ? ", red: held-out" : "");
	moe_points_leave(before);
	st = path && !p.failed ? moe_file_write(path, p.text, p.n)
			       : moe_fail(MOE_ERR_NOMEM, "no memory for the loss plot");
	moe_free(path);
	moe_free(p.text);
	return st;
}
