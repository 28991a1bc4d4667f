/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moesaic/progress.h"

#include <math.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define NOTICE 320

void progress_open(struct progress *p, const struct settings *s)
{
	*p = (struct progress){ .in_flight = strcmp(settings_text(s, "pipeline"), "sequential") ? 2 : 1 };
	if (settings_on(s, "quiet"))
		return;
	p->to = settings_on(s, "json") ? stderr : stdout;
	p->terminal = isatty(fileno(p->to));
}

void progress_close(struct progress *p)
{
	if (p->to && p->line_open)
		fputc('\n', p->to);
	p->line_open = false;
}

/* h:mm:ss or m:ss */
static void duration(char *buf, size_t size, double seconds)
{
	long s = isfinite(seconds) && seconds > 0 && seconds < 1e8 ? lround(seconds) : 0;

	if (s >= 3600)
		snprintf(buf, size, "%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60);
	else
		snprintf(buf, size, "%ld:%02ld", s / 60, s % 60);
}

/* "idle 7 % (dependency)" */
static void idle(char *buf, size_t size, const struct moe_train_event *e)
{
	int n = snprintf(buf, size, "idle %.0f %%", 100 * fmax(e->idle_share, 0)); /* tasks count in the step that they end in: it may be below 0 */

	if (e->idle_cause_share >= .005)
		snprintf(buf + n, size - (size_t)n, " (%s)", moe_idle_cause_name(e->idle_cause));
}

static void show_step(struct progress *p, const struct moe_train_event *e)
{
	long long step = e->step, total = e->total_steps;
	char eta[32], waiting[64];

	duration(eta, sizeof eta, e->eta_s);
	idle(waiting, sizeof waiting, e);
	if (p->terminal) {
		fprintf(p->to, "\r  step %lld/%lld  loss %.4f  %.0f tokens/s  %s left  %s\033[K",
			step, total, e->loss, e->tokens_per_s, eta, waiting);
		fflush(p->to);
		p->line_open = true;
	} else if (e->logged) {
		fprintf(p->to,
			"step %lld/%lld  loss %.4f  lr %.3g  grad_norm %.4g  %.0f tokens/s  %s "
			"left  %s\n",
			step, total, e->loss, e->learning_rate, e->grad_norm, e->tokens_per_s, eta,
			waiting);
	}
}

static void show_stop(const struct progress *p, int64_t step, int64_t total, double seconds)
{
	int64_t last = step + p->in_flight < total ? step + p->in_flight : total;
	char steps[64], time[32] = "", after[128] = "nothing is saved yet", notice[NOTICE];

	if (last > step + 1)
		snprintf(steps, sizeof steps, "step %lld, at most %lld,", (long long)step + 1, (long long)last);
	else
		snprintf(steps, sizeof steps, "step %lld", (long long)last);
	if (seconds > 0)
		snprintf(time, sizeof time, ", about %.0f s", ceil(seconds * (double)(last - step)));
	if (*p->saved)
		snprintf(after, sizeof after, "--resume then goes on from %s", p->saved);
	snprintf(notice, sizeof notice, "\nstopping: finishing %s of %lld%s, then saving. Once more ends at once: %s\n", steps,
		 (long long)total, time, after);
	interrupt_notice(notice);
}

/* The signal's notice follows what has been done and saved. */
static void follow(struct progress *p, const struct moe_train_event *e)
{
	const char *name = e->type == MOE_TRAIN_SAVED && e->text ? strrchr(e->text, '/') : NULL;
	int64_t left = e->total_steps - e->step;

	if (name)
		snprintf(p->saved, sizeof p->saved, "%s", name + 1);
	if (e->type == MOE_TRAIN_STEP)
		p->step_s = left > 0 ? e->eta_s / (double)left : 0;
	if (e->type == MOE_TRAIN_STEP || name)
		show_stop(p, e->step, e->total_steps, p->step_s);
}

void progress_event(struct progress *p, const struct moe_train_event *e)
{
	follow(p, e);
	if (e->type == MOE_TRAIN_WARNING) {
		progress_close(p);
		fprintf(stderr, "moesaic: warning: step %lld: %s\n", (long long)e->step, e->text);
	}
	if (!p->to)
		return;
	if (e->type == MOE_TRAIN_STEP) {
		show_step(p, e);
		return;
	}
	progress_close(p);
	if (e->type == MOE_TRAIN_EVAL)
		fprintf(p->to, "evaluation at step %lld: loss %.4f, perplexity %.2f\n",
			(long long)e->step, e->eval_loss, exp(e->eval_loss));
	else if (e->type == MOE_TRAIN_SAVED)
		fprintf(p->to, "saved %s\n", e->text);
}

/* ---- signals ---- */

static const int watched[] = { SIGINT, SIGTERM, SIGHUP };
#define WATCHED (int)(sizeof watched / sizeof *watched)
static bool ignored[WATCHED];
static volatile sig_atomic_t pending;

void interrupt_remember(void)
{
	struct sigaction old;

	for (int i = 0; i < WATCHED; i++)
		ignored[i] = sigaction(watched[i], NULL, &old) == 0 && old.sa_handler == SIG_IGN;
}

#define ONE_STOP 2 /* s: `timeout`, shells and terminals send the same wish to the process and to its group */

/* A handler may come at any instant: the text that it prints is never the one that is being written. */
static char notices[2][NOTICE];
static volatile sig_atomic_t shown;

void interrupt_notice(const char *text)
{
	int other = !shown;

	snprintf(notices[other], sizeof notices[other], "%s", text);
	shown = other;
}

static void on_signal(int number)
{
	const char *text = notices[shown];
	static struct timespec first;
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	if (pending && now.tv_sec - first.tv_sec < ONE_STOP)
		return;
	if (pending) {
		signal(number, SIG_DFL);
		raise(number); /* when this handler is over */
		return;
	}
	first = now;
	pending = 1;
	if (write(STDERR_FILENO, text, strlen(text)) < 0)
		return;
}

void interrupt_watch(const char *notice)
{
	struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_RESTART };

	interrupt_notice(notice);
	sigemptyset(&action.sa_mask);
	signal(SIGPIPE, SIG_IGN); /* whoever reads the progress may leave; training goes on */
	for (int i = 0; i < WATCHED; i++)
		if (!ignored[i])
			sigaction(watched[i], &action, NULL);
}

bool interrupt_pending(void)
{
	return pending;
}
