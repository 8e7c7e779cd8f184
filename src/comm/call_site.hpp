// Where in the source the collective under way was called: c10d's options have no room for it.
#pragma once

namespace isograd {

struct CallSite {
  const char* file = nullptr;  // null: unknown, as in calls that come through c10d
  unsigned line = 0;
};

namespace detail {
inline thread_local CallSite call_site;
}

inline CallSite current_call_site() {
  return detail::call_site;
}

// Names the call that this thread makes while it lives.
class CallSiteScope {
 public:
  explicit CallSiteScope(CallSite site) : outer_(detail::call_site) { detail::call_site = site; }
  ~CallSiteScope() { detail::call_site = outer_; }
  CallSiteScope(const CallSiteScope&) = delete;
  CallSiteScope& operator=(const CallSiteScope&) = delete;

 private:
  CallSite outer_;
};

}  // namespace isograd
