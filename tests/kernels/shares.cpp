// Which items threads are given. For a line "items threads last_first thread thread ..." the threads take one each in that
// order; the line that it answers has each of these, and which one was then announced as that thread's next.
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "threads.cpp"

int main() {
  using namespace fedmpq;
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream from(line);
    int items, threads, last_first;
    from >> items >> threads >> last_first;
    Job job(items, threads, last_first != 0 ? Order::last_first : Order::first_first);
    std::vector<Items> own;
    for (int thread = 0; thread < job.threads; ++thread) own.emplace_back(job, thread);
    for (int thread; from >> thread;) {
      const int item = own[thread].take();
      std::cout << item << ' ' << own[thread].next() << ' ';
    }
    std::cout << '\n';
  }
}
