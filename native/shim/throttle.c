#include "throttle.h"

#include "compute_budget.h"
#include "control.h"
#include "launch_timing.h"
#include "os.h"

#define FIRST_STEP_NS 50000ull /* a precharge may be refunded soon */
#define MAX_STEP_NS 5000000ull /* the limits may change meanwhile */

void throttle_wait(unsigned card, uint64_t cost) {
    uint64_t step = FIRST_STEP_NS, allowed_at;
    while ((allowed_at = compute_budget_take(card, cost))) {
        uint64_t now = os_nanoseconds(), retry_at = now + step;
        os_sleep_until(allowed_at < retry_at ? allowed_at : retry_at);
        compute_budget_count_wait(card, os_nanoseconds() - now);
        step = step * 2 < MAX_STEP_NS ? step * 2 : MAX_STEP_NS;
        launch_timings_poll();
        control_limits_compute(); /* reads the control page if it has changed */
    }
}
