// Pictures and the page of a plan, through the report room.
#pragma once

#include <string>
#include <vector>

#include "plan/trial.hpp"
#include "report/report.hpp"

namespace isograd::planner {

// SVG for a page; svg_file() (report.hpp) makes a file of one, svg_sheet() of charts.
std::string memory_bars(const Plan& plan);  // ranks of the best layout, the other layouts, the device's line
std::string step_bars(const Plan& plan);    // what a step is made of, by devices
std::string timeline_svg(const std::vector<Span>& spans,
                         double step);                     // a row for each lane, kLanesWidth wide
std::string chrome_trace(const std::vector<Span>& spans);  // JSON for chrome://tracing and Perfetto

Chart scaling_chart(const Plan& plan);  // log x; a mark at each law
Chart front_chart(const Plan& plan);
// Predicted against published seconds of a step, by program, between lines at 10 %.
Chart published_chart(const std::vector<PublishedRow>& rows);

// Everything, on one page without scripts, readable at 390 px, light and dark.
Report page(const Plan& plan, const std::vector<Span>& timeline);
Report page(const std::vector<PublishedRow>& rows);  // the models against published rows

}  // namespace isograd::planner
