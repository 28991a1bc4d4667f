/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/size.h"
#include "tools/moesaic/work.h"
#include "tools/moesaic/progress.h"

#include <time.h>
#include <unistd.h>

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void work_begin(struct work *w, const struct settings *s, const char *doing)
{
	*w = (struct work){ .doing = doing,
			    .terminal = isatty(STDERR_FILENO) && !settings_on(s, "quiet"),
			    .start = now() };
	interrupt_remember();
	interrupt_watch("\nstopping; once more kills\n");
}

int work_progress(const char *what, int64_t done, int64_t total, void *user)
{
	struct work *w = user;
	double t = now(), rate = (double)done / (t - w->start > 1e-3 ? t - w->start : 1e-3);
	long left = rate > 0 ? (long)((double)(total - done) / rate + .5) : 0;

	(void)what;
	if (w->terminal && (t - w->last >= .1 || done == total)) {
		fprintf(stderr, "\r  %s %s/%s  %.0f MiB/s  %ld:%02ld left\033[K", w->doing,
			moe_size(done).text, moe_size(total).text, rate / 0x1p20, left / 60,
			left % 60);
		w->last = t;
		w->shown = true;
	}
	return interrupt_pending();
}

void work_end(struct work *w)
{
	if (w->shown)
		fputs("\r\033[K", stderr);
	w->shown = false;
}
