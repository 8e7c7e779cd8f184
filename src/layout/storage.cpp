#include "layout/storage.hpp"

#include <fmt/format.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "base/refuse.hpp"

namespace isograd {
namespace {

// The tensors that autograd keeps because `tensor` was made as a view of them.
std::vector<const at::Tensor*> bases_of(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_view_autograd_meta(tensor);
  std::vector<const at::Tensor*> bases;
  if (!meta) return bases;
  if (meta->has_bw_view()) bases.push_back(&meta->get_backward_view().base_);
  if (meta->has_fw_view() && !meta->shared_view_info()) bases.push_back(&meta->get_forward_view().base_);
  return bases;
}

std::int64_t version_of(const at::Tensor& tensor) { return tensor.is_inference() ? 0 : tensor._version(); }

bool has_memory(const at::Tensor& tensor) { return !tensor.is_meta() && tensor.numel() > 0; }

void check_nothing_stays_behind(const std::vector<NamedParameter>& parameters) {
  const auto stays = [](const at::Tensor& tensor) {
    return has_memory(tensor) && !fills_its_storage(tensor);
  };
  // References to a storage that are no reason to refuse: the parameters themselves, and the tensors they
  // were made from as views if nothing else refers to those.
  std::unordered_map<const c10::StorageImpl*, std::size_t> known;
  std::unordered_map<const c10::TensorImpl*, std::pair<const at::Tensor*, std::size_t>> bases;
  for (const NamedParameter& parameter : parameters) {
    if (!stays(parameter.tensor)) continue;
    ++known[parameter.tensor.storage().unsafeGetStorageImpl()];
    for (const at::Tensor* base : bases_of(parameter.tensor)) {
      auto& [tensor, views] = bases[base->unsafeGetTensorImpl()];
      tensor = base;
      ++views;
    }
  }
  for (const auto& [impl, base] : bases)
    if (base.first->use_count() == base.second) ++known[base.first->storage().unsafeGetStorageImpl()];
  for (const auto& [name, tensor, decays, sync] : parameters) {
    if (!stays(tensor)) continue;
    const std::size_t others =
        tensor.storage().use_count() - known.at(tensor.storage().unsafeGetStorageImpl());
    if (others > 0)
      refuse(fmt::format("parameter '{}'", name),
             fmt::format("{} other tensor{} in the memory that it is a part or another order of", others,
                         others == 1 ? "" : "s"),
             "memory of its own, which the layout can move with all that share it",
             "Make the parameter with clone() or contiguous(), and what shares it from the parameter");
  }
}

struct Claimed {
  std::mutex mutex;
  std::unordered_set<const c10::StorageImpl*> storages;
};

Claimed& claimed() {
  static auto* all = new Claimed;  // outlives all threads
  return *all;
}

}  // namespace

bool fills_its_storage(const at::Tensor& parameter) {
  return parameter.is_contiguous() && parameter.storage_offset() == 0 &&
         parameter.storage().nbytes() == parameter.nbytes();
}

Claim::Claim(const std::vector<NamedParameter>& parameters) {
  check_nothing_stays_behind(parameters);
  for (const auto& [name, tensor, decays, sync] : parameters) {
    if (!has_memory(tensor) || !fills_its_storage(tensor)) continue;
    c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    const std::lock_guard<std::mutex> lock(claimed().mutex);
    if (claimed().storages.insert(storage).second) {
      storages_.push_back(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
      continue;
    }
    for (const auto& own : storages_) claimed().storages.erase(own.get());
    refuse(fmt::format("parameter '{}'", name),
           "memory that another parameter or layout uses, of this model or of another rank's",
           "a model of its own for each layout",
           "Destroy the other layout first; on ranks that are threads give each a clone()");
  }
}

Claim::~Claim() {
  const std::lock_guard<std::mutex> lock(claimed().mutex);
  for (const auto& storage : storages_) claimed().storages.erase(storage.get());
}

void give_memory(c10::StorageImpl& storage, const at::Tensor& memory) {
  auto* owner = new at::Tensor(memory);
  storage.set_data_ptr_noswap(c10::DataPtr(
      memory.mutable_data_ptr(), owner, [](void* held) { delete static_cast<at::Tensor*>(held); },
      memory.device()));
}

void Writes::add(const NamedParameter& parameter) {
  const at::Tensor& tensor = parameter.tensor;
  places_.push_back({parameter.name, tensor, tensor.storage(), version_of(tensor)});
}

void Writes::check_in_place() const {
  for (const Place& place : places_)
    if (place.parameter.storage().unsafeGetStorageImpl() != place.storage.unsafeGetStorageImpl())
      refuse(fmt::format("parameter '{}'", place.name), "values that no longer live in the layout's memory",
             "the tensor left in place",
             "Convert, move and load the model before making the layout; afterwards write values with "
             "its write()");
}

std::vector<std::size_t> Writes::written() const {
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < places_.size(); ++i)
    if (version_of(places_[i].parameter) != places_[i].version) result.push_back(i);
  return result;
}

void Writes::settle(std::size_t place) { places_.at(place).version = version_of(places_[place].parameter); }

}  // namespace isograd
