// Pictures and the page of a plan, through the report room.
#pragma once

#include <string>
#include <vector>

#include "plan/trial.hpp"
#include "report/report.hpp"

namespace isograd::planner {

std::string memory_bars(const Plan& plan);  // SVG: parts, head-room, the device's line
std::string timeline_svg(const std::vector<Span>& spans,
                         double step);                     // lanes of compute, tp, dp, pp by stage
std::string chrome_trace(const std::vector<Span>& spans);  // JSON
Chart scaling_chart(const Plan& plan);                     // log x; a mark at each law
Chart front_chart(const Plan& plan);
Chart published_chart(const std::vector<PublishedRow>& rows);  // foretold against published, by source
std::string step_bars(const Plan& plan);                       // what a step is made of, by devices

// Everything, on one page without scripts, readable at 390 px, light and dark.
Report page(const Plan& plan, const std::vector<Span>& timeline);

}  // namespace isograd::planner
