#include "train/video_show.hpp"

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>

#include <algorithm>

#include "base/markup.hpp"

namespace isograd {
namespace {

constexpr std::size_t kShown = 4;             // videos whose frames are shown
constexpr std::size_t kMeasured = 32;         // training videos whose losses are, at most
constexpr std::int64_t kFrames = 6;           // of a video, side by side
constexpr std::int64_t kGap = 2;              // pixels between them
constexpr std::int64_t kDraws = 8;            // of time and noise that a video's loss is the mean of
constexpr double kTimes[] = {0.3, 0.7, 0.9};  // of which the frames shown are noised; 0 is data, 1 is noise

// Spread over 0 .. n - 1, both ends among them.
std::vector<std::int64_t> spread(std::int64_t n, std::int64_t most) {
  std::vector<std::int64_t> picked;
  const std::int64_t parts = std::min(n, most);
  for (std::int64_t i = 0; i < parts; ++i) picked.push_back(parts == 1 ? 0 : i * (n - 1) / (parts - 1));
  return picked;
}

// Some frames of uint8 [F, H, W, 3] in one picture.
std::string strip(const at::Tensor& frames, const std::string& alternative) {
  std::vector<at::Tensor> columns;
  for (const std::int64_t f : spread(frames.size(0), kFrames)) {
    if (!columns.empty()) columns.push_back(at::full({frames.size(1), kGap, 3}, 255, at::kByte));
    columns.push_back(frames[f]);
  }
  return fmt::format("<img alt=\"{}\" src=\"data:image/png;base64,{}\"/>", escape_html(alternative),
                     base64(encode_png(at::cat(columns, 1).contiguous())));
}

std::string frames_html(VideoDiT& model, const VideoStore& store, const std::vector<std::int64_t>& videos,
                        std::uint64_t seed) {
  std::string html;
  for (const std::int64_t i : spread(static_cast<std::int64_t>(videos.size()), kShown)) {
    const std::int64_t video = videos[static_cast<std::size_t>(i)];
    const VideoGrid grid = store.grid(video);
    html += fmt::format("<h3>{}<span>{} patches, {} x {} x {}</span></h3><div class=\"frames\">",
                        escape_html(store.name(video)), grid.count(), grid.t, grid.h, grid.w);
    bool first = true;
    for (const double time : kTimes) {
      const PredictedVideo shown = predict_frames(model, store, video, time, seed);
      const auto row = [&](const std::string& label, const at::Tensor& frames) {
        html += fmt::format("<span>{}</span>{}", escape_html(label),
                            strip(frames, label + " frames of " + store.name(video)));
      };
      if (first) row("original", shown.original);
      row(fmt::format("noised, t = {:g}", time), shown.noised);
      row("prediction", shown.predicted);
      first = false;
    }
    html += "</div>";
  }
  return html;
}

struct VideoLoss {
  std::int64_t video = 0;
  bool held_out = false;
  double loss = 0;
};

double mean_loss(VideoDiT& model, const VideoStore& store, std::int64_t video, std::uint64_t seed) {
  double sum = 0;
  for (std::int64_t draw = 0; draw < kDraws; ++draw)
    sum +=
        flow_matching_token_losses(model, store, video_batch(store, video, draw), seed).sum().item<double>();
  return sum / static_cast<double>(kDraws * store.grid(video).count());
}

Chart losses_chart(const VideoStore& store, const std::vector<VideoLoss>& losses) {
  Chart chart{.title = "Loss by length",
              .x_label = "patches of the video",
              .y_label = fmt::format("squared error, mean of {} draws", kDraws),
              .series = {{.name = "held out", .points = {}}, {.name = "trained on", .points = {}}},
              .lines = false};
  for (const VideoLoss& of : losses)
    chart.series[of.held_out ? 0 : 1].points.push_back(
        {static_cast<double>(store.num_tokens(of.video)), of.loss});
  std::erase_if(chart.series, [](const Series& series) { return series.points.empty(); });
  return chart;
}

}  // namespace

Showing show_videos(VideoDiT& model, const VideoStore& store, const std::vector<std::int64_t>& held_out,
                    const std::vector<std::int64_t>& trained, std::uint64_t seed) {
  Showing showing;
  showing.pictures.push_back(
      {.title = held_out.empty() ? "Frames" : "Frames of held-out videos",
       .caption = "Each video as it is; noised to a time t, where 0 is the video and 1 is noise; and what "
                  "the model takes the video to be when it sees that, in one step.",
       .html = frames_html(model, store, held_out.empty() ? trained : held_out, seed)});
  std::vector<VideoLoss> losses;
  for (const std::int64_t video : held_out)
    losses.push_back({video, true, mean_loss(model, store, video, seed)});
  for (const std::int64_t i : spread(static_cast<std::int64_t>(trained.size()), kMeasured)) {
    const std::int64_t video = trained[static_cast<std::size_t>(i)];
    losses.push_back({video, false, mean_loss(model, store, video, seed)});
  }
  std::stable_sort(losses.begin(), losses.end(), [&](const VideoLoss& a, const VideoLoss& b) {
    return store.num_tokens(a.video) < store.num_tokens(b.video);
  });
  showing.charts.push_back(losses_chart(store, losses));
  ReportTable table{
      .title = "Loss of each video",
      .summary = fmt::format("the mean over a video's patches and {} draws of time and noise", kDraws),
      .columns = {"video", "", "patches", "frames x rows x columns", "loss"},
      .rows = {}};
  for (const VideoLoss& of : losses) {
    const VideoGrid grid = store.grid(of.video);
    table.rows.push_back({store.name(of.video), of.held_out ? "held out" : "trained on",
                          std::to_string(grid.count()), fmt::format("{} x {} x {}", grid.t, grid.h, grid.w),
                          fmt::format("{:.4f}", of.loss)});
  }
  showing.tables.push_back(std::move(table));
  return showing;
}

std::string base64(std::string_view bytes) {
  static constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  text.reserve((bytes.size() + 2) / 3 * 4);
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    std::uint32_t group = 0;
    const std::size_t taken = std::min<std::size_t>(3, bytes.size() - i);
    for (std::size_t j = 0; j < 3; ++j)
      group = group << 8 | (j < taken ? static_cast<unsigned char>(bytes[i + j]) : 0u);
    for (std::size_t j = 0; j < 4; ++j) text += j <= taken ? kDigits[group >> (18 - 6 * j) & 63] : '=';
  }
  return text;
}

}  // namespace isograd
