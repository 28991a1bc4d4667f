/* SPDX-License-Identifier: Apache-2.0 */
#include "train/schedule.h"
#include "engine/points.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum argument {
	NUM_CYCLES,
	LR_END,
	POWER,
	TIMESCALE,
	MIN_LR,
	MIN_LR_RATE,
	WARMUP_LR_RATE,
	NUM_DECAY_STEPS,
	NUM_STABLE_STEPS,
	MIN_LR_RATIO,
	WARMUP_TYPE,
	DECAY_TYPE,
	ARGUMENTS
};
#define BIT(a) (1u << (a))

static const char *const argument_names[ARGUMENTS] = {
	"num_cycles",	    "lr_end",	    "power",	      "timescale",
	"min_lr",	    "min_lr_rate",  "warmup_lr_rate", "num_decay_steps",
	"num_stable_steps", "min_lr_ratio", "warmup_type",    "decay_type",
};

enum shape { LINEAR, COSINE, ONE_MINUS_SQRT, SHAPES };
static const char *const shape_names[SHAPES] = { "linear", "cosine", "1-sqrt" };

/* done: steps before this one; past the warm-up. */
typedef double (*factor_fn)(const struct moe_schedule *s, double done);

static double share_done(const struct moe_schedule *s, double done)
{
	return (done - (double)s->warmup) / (double)MOE_MAX(s->total - s->warmup, 1);
}

static double one(const struct moe_schedule *s, double done)
{
	(void)s;
	(void)done;
	return 1;
}

static double linear(const struct moe_schedule *s, double done)
{
	return 1 - share_done(s, done);
}

static double half_cosine(const struct moe_schedule *s, double progress)
{
	return 0.5 * (1 + cos(M_PI * s->cycles * 2 * progress)) * (1 - s->min) + s->min;
}

static double cosine(const struct moe_schedule *s, double done)
{
	return half_cosine(s, share_done(s, done));
}

/* The first step after the warm-up is a step down already. */
static double cosine_early(const struct moe_schedule *s, double done)
{
	return half_cosine(s, share_done(s, done + 1));
}

static double restarts(const struct moe_schedule *s, double done)
{
	double progress = share_done(s, done);

	return progress >= 1 ? 0 : 0.5 * (1 + cos(M_PI * fmod(s->cycles * progress, 1)));
}

static double polynomial(const struct moe_schedule *s, double done)
{
	double left = 1 - share_done(s, done);

	return (1 - s->min) * pow(MOE_MAX(left, 0.0), s->power) + s->min;
}

static double inverse_sqrt(const struct moe_schedule *s, double done)
{
	return 1 / sqrt((done + s->timescale - (double)s->warmup) / s->timescale);
}

static double stable_decay(const struct moe_schedule *s, double done)
{
	double past = done - (double)(s->warmup + s->stable), progress, f;

	if (past < 0)
		return 1;
	if (past >= (double)s->decay)
		return s->min;
	progress = past / (double)MOE_MAX(s->decay, 1);
	f = s->decay_shape == LINEAR   ? 1 - progress
	    : s->decay_shape == COSINE ? 0.5 * (1 + cos(M_PI * s->cycles * 2 * progress))
				       : 1 - sqrt(progress);
	return f * (1 - s->min) + s->min;
}

static const struct {
	const char *name;
	factor_fn factor;
	unsigned allowed, needed; /* arguments; one of `needed` must be there */
	double cycles;
} kinds[] = {
	{ "cosine", cosine, BIT(NUM_CYCLES), 0, .5 },
	{ "linear", linear, 0, 0, 0 },
	{ "constant", one, 0, 0, 0 },
	{ "constant_with_warmup", one, 0, 0, 0 },
	{ "cosine_with_restarts", restarts, BIT(NUM_CYCLES), 0, 1 },
	{ "polynomial", polynomial, BIT(LR_END) | BIT(POWER), 0, 0 },
	{ "inverse_sqrt", inverse_sqrt, BIT(TIMESCALE), 0, 0 },
	{ "cosine_with_min_lr", cosine, BIT(NUM_CYCLES) | BIT(MIN_LR) | BIT(MIN_LR_RATE),
	  BIT(MIN_LR) | BIT(MIN_LR_RATE), .5 },
	{ "cosine_warmup_with_min_lr", cosine_early,
	  BIT(NUM_CYCLES) | BIT(MIN_LR) | BIT(MIN_LR_RATE) | BIT(WARMUP_LR_RATE),
	  BIT(MIN_LR) | BIT(MIN_LR_RATE), .5 },
	{ "warmup_stable_decay", stable_decay,
	  BIT(NUM_DECAY_STEPS) | BIT(NUM_STABLE_STEPS) | BIT(MIN_LR_RATIO) | BIT(WARMUP_TYPE) |
		  BIT(DECAY_TYPE) | BIT(NUM_CYCLES),
	  BIT(NUM_DECAY_STEPS), .5 },
};

static bool is_kind(const struct moe_schedule *s, factor_fn factor)
{
	return kinds[s->kind].factor == factor;
}

static enum moe_status unknown_kind(const char *name)
{
	char list[256] = "";

	for (size_t i = 0; i < MOE_COUNT(kinds); i++)
		snprintf(list + strlen(list), sizeof list - strlen(list), " %s", kinds[i].name);
	if (!strcmp(name, "reduce_lr_on_plateau") || !strcmp(name, "greedy"))
		return moe_fail(
			MOE_ERR_ARG,
			"learning-rate schedule \"%s\" follows a measured loss, which is not "
			"supported; supported:%s",
			name, list);
	return moe_fail(MOE_ERR_ARG, "learning-rate schedule \"%s\"; supported:%s", name, list);
}

/* The names of a set of arguments, for messages. */
static void name_arguments(unsigned set, char *buf, size_t size)
{
	snprintf(buf, size, "%s", set ? "" : " none");
	for (int a = 0; a < ARGUMENTS; a++)
		if (set & BIT(a))
			snprintf(buf + strlen(buf), size - strlen(buf), " %s", argument_names[a]);
}

static enum moe_status parse_shape(const char *key, const char *text, int *out)
{
	for (int i = 0; i < SHAPES; i++)
		if (!strcmp(text, shape_names[i])) {
			*out = i;
			return MOE_OK;
		}
	return moe_fail(MOE_ERR_ARG,
			"schedule argument %s: \"%s\"; linear, cosine and 1-sqrt are "
			"possible",
			key, text);
}

static enum moe_status set_argument(struct moe_schedule *s, enum argument a, const char *text,
				    double peak)
{
	const char *key = argument_names[a];
	char *end;
	double v;

	if (a == WARMUP_TYPE)
		return parse_shape(key, text, &s->warmup_shape);
	if (a == DECAY_TYPE)
		return parse_shape(key, text, &s->decay_shape);
	v = moe_strtod(text, &end);
	if (end == text || *end || !isfinite(v) || v < 0 || v > 1e15)
		return moe_fail(MOE_ERR_ARG, "schedule argument %s: \"%s\" is not a number from 0",
				key, text);
	if ((a == LR_END && v >= peak) || (a == MIN_LR && v > peak) ||
	    ((a == MIN_LR_RATE || a == MIN_LR_RATIO || a == WARMUP_LR_RATE) && v > 1))
		return moe_fail(MOE_ERR_ARG,
				"schedule argument %s: %s is above the learning rate %g", key, text,
				peak);
	if (a == TIMESCALE && v == 0)
		return moe_fail(MOE_ERR_ARG, "schedule argument timescale: 0");
	switch (a) {
	case NUM_CYCLES:
		s->cycles = v;
		break;
	case POWER:
		s->power = v;
		break;
	case TIMESCALE:
		s->timescale = v;
		break;
	case LR_END:
	case MIN_LR:
		s->min = v / peak;
		break;
	case MIN_LR_RATE:
	case MIN_LR_RATIO:
		s->min = v;
		break;
	case WARMUP_LR_RATE:
		s->warmup_rate = v;
		break;
	case NUM_DECAY_STEPS:
		s->decay = (int64_t)v;
		break;
	default:
		s->stable = (int64_t)v;
		break;
	}
	return MOE_OK;
}

/* "key=value,..."; spaces around are allowed. text is cut up. */
static enum moe_status parse_arguments(struct moe_schedule *s, char *text, double peak,
				       unsigned *given)
{
	char allowed[256], *rest = NULL;

	name_arguments(kinds[s->kind].allowed, allowed, sizeof allowed);
	for (char *item = strtok_r(text, ", ", &rest); item; item = strtok_r(NULL, ", ", &rest)) {
		char *value = strchr(item, '=');
		int a = 0;

		if (value)
			*value++ = 0;
		while (a < ARGUMENTS && strcmp(item, argument_names[a]) != 0)
			a++;
		if (!value || a == ARGUMENTS || !(kinds[s->kind].allowed & BIT(a)))
			return moe_fail(MOE_ERR_ARG,
					"schedule argument \"%s\"; %s takes key=value of:%s", item,
					kinds[s->kind].name, allowed);
		MOE_TRY(set_argument(s, (enum argument)a, value, peak));
		*given |= BIT(a);
	}
	return MOE_OK;
}

static enum moe_status finish(struct moe_schedule *s, unsigned given)
{
	char needed[128];

	if (kinds[s->kind].needed && !(given & kinds[s->kind].needed)) {
		name_arguments(kinds[s->kind].needed, needed, sizeof needed);
		return moe_fail(MOE_ERR_ARG, "schedule %s needs an argument of:%s",
				kinds[s->kind].name, needed);
	}
	if ((given & BIT(MIN_LR)) && (given & BIT(MIN_LR_RATE)))
		return moe_fail(MOE_ERR_ARG,
				"schedule arguments min_lr and min_lr_rate: one of them");
	if (is_kind(s, inverse_sqrt) && s->timescale == 0)
		s->timescale = s->warmup ? (double)s->warmup : 10000;
	if (is_kind(s, stable_decay) && !(given & BIT(NUM_STABLE_STEPS)))
		s->stable = s->total - s->warmup - s->decay;
	if (s->stable < 0)
		return moe_fail(
			MOE_ERR_ARG,
			"schedule %s: %lld steps of warm-up and %lld of decay are more than "
			"all %lld",
			kinds[s->kind].name, (long long)s->warmup, (long long)s->decay,
			(long long)s->total);
	return MOE_OK;
}

enum moe_status moe_schedule_create(const char *name, const char *args, double peak, int64_t total,
				    int64_t warmup, struct moe_schedule *out)
{
	unsigned given = 0;
	enum moe_status st;
	char *text;
	size_t kind = 0;

	while (name && *name && kind < MOE_COUNT(kinds) && strcmp(name, kinds[kind].name) != 0)
		kind++;
	if (kind == MOE_COUNT(kinds))
		return unknown_kind(name);
	*out = (struct moe_schedule){ .kind = (int)kind,
				      .total = total,
				      .warmup = warmup,
				      .cycles = kinds[kind].cycles,
				      .power = 1,
				      .warmup_rate = -1,
				      .decay_shape = COSINE };
	if (is_kind(out, polynomial))
		out->min = MOE_MIN(1e-7 / peak, 1.0);
	text = moe_strdup(args ? args : "");
	if (!text)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a schedule");
	st = parse_arguments(out, text, peak, &given);
	moe_free(text);
	return st == MOE_OK ? finish(out, given) : st;
}

/* Steps 0..warmup - 1. */
static double rising(const struct moe_schedule *s, double done)
{
	double n = (double)MOE_MAX(s->warmup, 1), progress = done / n;

	if (is_kind(s, cosine_early))
		return s->warmup_rate < 0
			       ? (done + 1) / n
			       : s->warmup_rate + (1 - s->warmup_rate) * done / MOE_MAX(n - 1, 1.0);
	if (!is_kind(s, stable_decay))
		return progress;
	if (s->warmup_shape == COSINE)
		progress = 0.5 * (1 - cos(M_PI * progress));
	else if (s->warmup_shape == ONE_MINUS_SQRT)
		progress = 1 - sqrt(1 - progress);
	return progress * (1 - s->min) + s->min;
}

double moe_schedule_factor(const struct moe_schedule *s, int64_t step)
{
	double done = (double)(step - 1);

	if (!strcmp(kinds[s->kind].name, "constant"))
		return 1;
	if (step - 1 < s->warmup)
		return MOE_MAX(0.0, rising(s, done));
	return MOE_MAX(0.0, kinds[s->kind].factor(s, done));
}

int64_t moe_schedule_warmup(double ratio, int64_t steps, int64_t total)
{
	return steps > 0 ? steps : (int64_t)ceil(ratio * (double)total);
}
